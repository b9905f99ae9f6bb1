// Shows the rollouts. `pods.ledger(data)` can be called again with new groups: filters and open lines stay.
window.pods.ledger = (() => {
  const open = new Map();  // what the reader opened or closed, by key
  const PAGE = 20;  // groups that are shown at first, and that "more" adds
  const MARGIN = 900;  // pixels above and below the window
  let arms = [], colours = [], runs = [], texts = [], groups = [], first = null, wanted = {}, pattern = null, found = [], prompt = null, ready = false, most = PAGE;

  const at = (id) => document.getElementById(id);
  const make = (tag, name, ...parts) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...parts);
    return element;
  };
  const button = (text, act) => {
    const made = make("button", "", text);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  };

  // Elements for many items, made in chunks near the window and removed far from it.
  const virtual = (parent, items, size, guess, one) => {
    if (items.length <= size) return parent.append(...items.map(one));
    const fill = (chunk) => {
      const from = Number(chunk.dataset.from);
      chunk.style.height = "";
      chunk.append(...items.slice(from, from + size).map(one));
    };
    const watcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting && !target.firstChild) fill(target);
        else if (!isIntersecting && target.firstChild && target.offsetHeight && !target.contains(document.activeElement)) {
          target.style.height = `${target.offsetHeight}px`;
          target.replaceChildren();
        }
      }
    }, { root: document, rootMargin: `${MARGIN}px 0px` });
    for (let from = 0; from < items.length; from += size) {
      const chunk = make("div");
      chunk.dataset.from = from;
      chunk.style.height = `${guess * Math.min(size, items.length - from)}px`;
      parent.append(chunk);
      watcher.observe(chunk);
    }
  };

  const hit = (id) => (found[id] ??= texts[id].search(pattern) >= 0);
  const pre = (id) => {
    const parts = [], text = texts[id];
    let from = 0;
    for (const match of pattern ? text.matchAll(pattern) : []) {
      parts.push(text.slice(from, match.index), make("mark", "", match[0]));
      from = match.index + match[0].length;
      if (parts.length > 40) break;
    }
    return make("pre", "", ...parts, text.slice(from));
  };
  // A details element whose content is made when it is opened.
  const folding = (name, key, summary, isOpen, fill) => {
    const box = make("details", name, summary);
    const once = () => { if (box.open && box.childElementCount === 1) box.append(...fill()); };
    box.open = open.get(key) ?? isOpen;
    once();
    summary.addEventListener("click", () => open.set(key, !box.open));
    box.addEventListener("toggle", once);
    return box;
  };

  const rowElement = (row, key) => {
    const mark = row.kept === 0 ? "○" : row.kept === row.count ? "●" : "◐";
    const advantage = row.advantage === null ? "" : `${row.advantage < 0 ? "" : "+"}${row.advantage.toFixed(2)}`;
    const line = make("summary", "", make("span", "m", mark), make("span", "n", row.reward?.toFixed(3) ?? "–"),
      make("span", "a", advantage), make("span", "x", row.count > 1 ? `${row.count} ×` : ""), pre(row.text));
    const names = `${row.numbers.join(", ")}${row.count > row.numbers.length ? ", …" : ""}`;
    const which = row.count > 1 ? `${row.count} equal rollouts (${names}), ${row.kept} kept` : `rollout ${names}`;
    return folding(row.kept ? "r k" : "r", `${key} ${row.numbers[0]}`, line, pattern !== null && hit(row.text),
      () => [make("p", "", [which, texts[row.facts]].filter(Boolean).join(" · "))]);
  };
  const strip = (rows) => {
    const box = make("span", "strip"), rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
    const low = Math.min(...rewards), high = Math.max(...rewards);
    for (const row of rows) {
      const height = row.reward === null ? 0 : high > low ? 12 + (88 * (row.reward - low)) / (high - low) : 50;
      for (const [count, name] of [[row.kept, "k"], [row.count - row.kept, ""]]) {
        if (!count) continue;
        const bar = make("i", name);
        Object.assign(bar.style, { height: `${height}%`, flexGrow: count });
        box.append(bar);
      }
    }
    return box;
  };
  const gist = (id) => texts[id].slice(0, 400).replace(/\s+/g, " ").trim();
  const groupElement = ({ group, rows }) => {
    const swatch = make("i", "swatch");
    swatch.style.background = colours[group.arm];
    const head = make("summary", "",
      make("span", "where", swatch, make("b", "", arms[group.arm]), ` step ${group.step} · ${runs[group.run]} · group ${group.id}`),
      make("span", "gist", gist(group.question)), make("span", "stat", group.stat), strip(group.rows));
    const box = folding("g", group.key, head, wanted.deep || group === first, () => {
      const others = groups.filter((other) => other.prompt === group.prompt).length - 1;
      const about = make("div", "prompt", make("h3", "", "Prompt"), pre(group.prompt));
      if (texts[group.answer]) about.append(make("h3", "", "Gold answer"), pre(group.answer));
      if (others) about.append(button(`Only this prompt (${others} more groups)`, () => { prompt = texts[group.prompt]; most = PAGE; apply(); }));
      const names = make("div", "cols", ...["", "reward", "adv.", "", "rollout"].map((name) => make("span", "", name)));
      const list = make("div", "rows");
      virtual(list, rows, 25, 30, (row) => rowElement(row, group.key));
      return [about, names, list];
    });
    box.style.setProperty("--arm", colours[group.arm]);
    return box;
  };

  // Orders of groups. A group without a reward is the last in orders by reward.
  const number = (value) => value ?? -Infinity;
  const ORDERS = {
    spread: (a, b) => b.drops - a.drops || number(b.spread) - number(a.spread) || 0,
    first: (a, b) => a.step - b.step,
    last: (a, b) => b.step - a.step,
    high: (a, b) => number(b.mean) - number(a.mean) || 0,
    low: (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity) || 0,
  };

  const read = () => {
    const value = (id) => at(id).value, limit = (id, otherwise) => (value(id) === "" ? otherwise : Number(value(id)));
    const text = value("f-text").trim();
    pattern = text ? new RegExp(text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "giu") : null;
    found = [];
    wanted = {
      arm: value("f-arm"), run: value("f-run"), kept: value("f-kept"),
      from: limit("f-from", -Infinity), to: limit("f-to", Infinity), low: limit("f-low", -Infinity), high: limit("f-high", Infinity),
    };
    wanted.ranged = wanted.low > -Infinity || wanted.high < Infinity;  // a rollout without a reward is in no range
    wanted.deep = wanted.ranged || wanted.kept !== "" || pattern !== null;
  };
  const countOf = (row) => {
    if (wanted.ranged && !(row.reward !== null && row.reward >= wanted.low && row.reward <= wanted.high)) return 0;
    return wanted.kept === "" ? row.count : wanted.kept === "1" ? row.kept : row.count - row.kept;
  };
  const apply = () => {
    read();
    const shown = [];
    let rollouts = 0;
    for (const group of [...groups].sort(ORDERS[at("f-sort").value])) {
      if ((wanted.arm && arms[group.arm] !== wanted.arm) || (wanted.run && runs[group.run] !== wanted.run)
        || group.step < wanted.from || group.step > wanted.to || (prompt !== null && texts[group.prompt] !== prompt)) continue;
      const inPrompt = !pattern || hit(group.prompt) || hit(group.answer);
      const rows = group.rows.filter((row) => countOf(row) && (inPrompt || hit(row.text)));
      if (!rows.length) continue;
      rollouts += rows.reduce((sum, row) => sum + countOf(row), 0);
      shown.push({ group, rows });
    }
    first = shown[0]?.group;
    const only = prompt === null ? "" : " of one prompt";
    at("f-count").textContent = shown.length ? `${shown.length} of ${groups.length} groups${only}, ${rollouts} rollouts` : "No rollout matches.";
    at("ledger-groups").replaceChildren();
    virtual(at("ledger-groups"), shown.slice(0, most), PAGE, wanted.deep ? 600 : 100, groupElement);
    const rest = shown.length - most;
    if (rest <= 0) return;
    const more = button(`${Math.min(rest, PAGE)} more of ${rest}`, () => {
      most += PAGE;
      apply();
      document.getElementById("ledger-more")?.focus({ preventScroll: true });
    });
    more.id = "ledger-more";
    at("ledger-groups").append(more);
  };
  const listen = () => {
    let timer = 0;
    const change = (wait) => {
      open.clear();
      most = PAGE;
      clearTimeout(timer);
      timer = setTimeout(apply, wait);
    };
    at("filter").addEventListener("input", () => change(120));
    at("f-clear").addEventListener("click", () => {
      for (const field of at("filter").querySelectorAll("select, input")) if (field.id !== "f-sort") field.value = "";
      prompt = null;
      change(0);
    });
  };

  return (data) => {
    if (!data.groups || !at("ledger")) return;
    ({ arms, colours, runs, texts } = data);
    groups = data.groups.map(([arm, run, step, id, prompt, question, answer, stat, mean, spread, rows]) => ({
      arm, run, step, id, prompt, question, answer, stat, mean, spread,
      drops: rows.some(([, , count, kept]) => kept < count),  // n > m
      key: `${arms[arm]}\n${runs[run]}\n${step}\n${id}`,
      rows: rows.map(([text, reward, count, kept, advantage, facts, numbers]) => ({ text, reward, count, kept, advantage, facts, numbers })),
    }));
    for (const [id, names] of [["f-arm", arms], ["f-run", runs]]) {
      const value = at(id).value;
      at(id).replaceChildren(new Option("all", ""), ...names.map((name) => new Option(name, name, false, name === value)));
    }
    const cut = data.total - groups.length;
    at("ledger-size").textContent = `${groups.length} of ${data.total} logged groups are on this page.`
      + (cut ? " The files rollouts/*.parquet of each run have all." : "");
    if (!ready) listen();
    ready = true;
    apply();
  };
})();
