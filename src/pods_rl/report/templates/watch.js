// Keeps a served page up to date: once a second it asks whether the server has made the report again.
(() => {
  const parts = (page) => [...page.querySelectorAll("#head, #nav, main > *")];
  const sent = new Map(parts(document).map((part) => [part.id, part.outerHTML]));
  const isDrawn = (part) => part.matches("figure, #ledger");  // a script fills these, with the data
  let version = null;

  const get = (path, type) => new Promise((done, fail) => {
    const request = new XMLHttpRequest();
    request.open("GET", path);
    request.responseType = type;
    request.onload = () => (request.status === 200 && request.response ? done(request.response) : fail(request.status));
    request.onerror = fail;
    request.send();
  });

  // A document, not a string: the page's policy allows no string to become elements.
  const swap = (page) => {
    const next = parts(page);
    for (const part of parts(document)) if (!next.some((one) => one.id === part.id)) part.remove();
    let last = null;
    for (const part of next) {
      const old = document.getElementById(part.id), html = part.outerHTML;
      let shown = old;
      if (!old || (!isDrawn(part) && sent.get(part.id) !== html)) {
        shown = document.importNode(part, true);
        for (const box of shown.querySelectorAll("details[id]")) box.open = document.getElementById(box.id)?.open ?? false;
        if (old) old.replaceWith(shown);
        else if (last?.parentNode.matches("main")) last.after(shown);
        else document.querySelector("main").prepend(shown);
      }
      sent.set(part.id, html);
      last = shown;
    }
    document.title = page.title;
  };

  const mark = document.createElement("output");
  mark.id = "live";
  document.body.prepend(mark);  // above the page: it covers nothing
  const look = async () => {
    try {
      const state = await get("/state", "json");
      if (state.version !== version) {
        swap(await get("/parts", "document"));
        window.pods.ledger(await get("/rollouts", "json"));
        window.pods.figures(await get("/points", "json"));
      }
      version = state.version;
      mark.textContent = state.note || `live: ${state.state} · ${state.age} s old`;
    } catch {
      mark.textContent = "not live: pods watch has ended";
    }
    setTimeout(look, 1000);
  };
  look();
})();
