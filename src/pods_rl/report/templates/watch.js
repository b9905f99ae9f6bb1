// Keeps a served page up to date: replaces the parts that changed, with scroll, filters and open details as they are.
(() => {
  const policy = (page) => page.querySelector("meta[http-equiv]").content;
  const parts = (page) => {
    const found = new Map();
    const add = (element, group) => {
      const name = `${group} ${element.id || element.tagName}`;
      let number = 0;
      while (found.has(`${name} ${number}`)) number += 1;
      found.set(`${name} ${number}`, element);
    };
    for (const element of page.querySelectorAll("body > header, body > nav")) add(element, "body");
    for (const element of page.querySelector("main").children) add(element, "main");
    return found;
  };
  const shown = parts(document);  // the elements on the screen, by name
  let before = parts(document.cloneNode(true));  // as the server sent them
  let version = document.currentScript.dataset.version;

  const fields = () => [...document.querySelectorAll("input[id], select[id], textarea[id]")];
  const details = () => {
    const found = new Map();
    for (const one of document.querySelectorAll("details")) {
      const name = `${JSON.stringify({ ...one.dataset })} ${one.id} ${one.querySelector("summary")?.textContent.slice(0, 200)}`;
      let number = 0;
      while (found.has(`${name} ${number}`)) number += 1;
      found.set(`${name} ${number}`, one);
    }
    return found;
  };
  const keep = () => {
    const values = new Map(fields().map((field) => [field.id, [field.value, field.checked]]));
    const open = new Map([...details()].map(([name, one]) => [name, one.open]));
    const focus = document.activeElement?.id;
    const top = [...details().entries(), ...shown.entries()]
      .map(([name, element]) => [name, element.getBoundingClientRect()])
      .filter(([, box]) => box.height && box.bottom > 0).sort(([, a], [, b]) => Math.abs(a.top) - Math.abs(b.top))[0];
    const sideways = new Map([...shown].map(([name, part]) =>
      [name, [...part.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop])]));
    return () => {
      for (const field of fields()) {
        const [value, checked] = values.get(field.id) ?? [field.value, field.checked];
        if (field.value === value && field.checked === checked) continue;
        field.value = value;
        field.checked = checked;
        for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, { bubbles: true }));
      }
      const now = details();
      for (const [name, one] of now) if (open.has(name) && one.open !== open.get(name)) one.open = open.get(name);
      for (const [name, offsets] of sideways) {
        shown.get(name)?.querySelectorAll(".scroll").forEach((one, place) => one.scrollTo(...(offsets[place] ?? [0, 0])));
      }
      if (focus && document.activeElement?.id !== focus) document.getElementById(focus)?.focus({ preventScroll: true });
      const anchor = top && (now.get(top[0]) ?? shown.get(top[0]));
      if (anchor && window.scrollY) window.scrollBy(0, anchor.getBoundingClientRect().top - top[1].top);
    };
  };

  const swap = (page) => {
    const next = parts(page), restore = keep();
    for (const [name, element] of shown) {
      if (!next.has(name)) {
        element.remove();
        shown.delete(name);
      }
    }
    let last = null;  // the element on the screen that comes before
    for (const [name, element] of next) {
      if (!before.get(name)?.isEqualNode(element)) {
        const fresh = document.importNode(element, true);
        if (shown.has(name)) shown.get(name).replaceWith(fresh);
        else if (last && last.parentNode.tagName === element.parentNode.tagName) last.after(fresh);
        else document.querySelector(element.parentNode.tagName).prepend(fresh);
        shown.set(name, fresh);
      }
      last = shown.get(name);
    }
    for (const data of page.querySelectorAll('body > script[type="application/json"]')) {
      const old = document.getElementById(data.id);
      if (old?.textContent === data.textContent) continue;
      if (old) old.replaceWith(document.importNode(data, true));
      else document.body.append(document.importNode(data, true));
    }
    before = next;
    document.title = page.title;
    for (const start of window.pods ?? []) start(document);
    restore();
  };

  // A document, not a string: the page's policy allows no string to become elements.
  const fetched = () => new Promise((done, fail) => {
    const request = new XMLHttpRequest();
    request.open("GET", "/");
    request.responseType = "document";
    request.onload = () => (request.status === 200 && request.response ? done(request.response) : fail(request.status));
    request.onerror = fail;
    request.send();
  });
  const mark = document.createElement("output");
  mark.id = "live";
  Object.assign(mark.style, {
    position: "fixed", right: ".5rem", bottom: ".5rem", padding: ".1rem .5rem", borderRadius: ".5rem", zIndex: 9,
    font: "12px system-ui, sans-serif", background: "Canvas", color: "CanvasText", border: "1px solid GrayText",
  });
  document.body.append(mark);
  const look = async () => {
    try {
      const state = await (await fetch("/version", { cache: "no-store" })).json();
      if (String(state.version) !== version) {
        const page = await fetched();
        if (policy(page) !== policy(document)) {
          location.reload();  // other scripts and styles
          return;
        }
        swap(page);
        version = page.querySelector("script[data-version]").dataset.version;
      }
      mark.textContent = state.note || `live: ${state.state}`;
    } catch {
      mark.textContent = "not live: pods watch has ended";
    }
    setTimeout(look, 1000);
  };
  look();
})();
