(window.pods ??= []).push((() => {
  // What the reader chose. It outlives the elements, which a live page replaces.
  const state = { fields: {}, open: new Map(), rows: new Map(), prompt: null, sides: [null, null], kind: "" };
  let island = null;
  const MARGIN = 900;  // pixels above and below the window

  const make = (tag, name, ...parts) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...parts.filter((part) => part !== null));
    return element;
  };
  const number = (value, digits) => (value === null ? "–" : value.toFixed(digits));
  const percent = (share) => `${Math.round(100 * share)} %`;
  const oneLine = (text) => text.replace(/\s+/g, " ").trim();
  const plural = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

  // Elements for many items, made in chunks near the window and removed far from it.
  const virtual = (parent, items, size, guess, one) => {
    const fill = (chunk) => {
      const from = Number(chunk.dataset.from);
      chunk.style.height = "";
      chunk.append(...items.slice(from, from + size).map(one));
    };
    if (items.length <= size) return parent.append(...items.map(one));
    const watcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting && !target.firstChild) fill(target);
        else if (!isIntersecting && target.firstChild && target.offsetHeight && !target.contains(document.activeElement)) {
          target.style.height = `${target.offsetHeight}px`;
          target.replaceChildren();
        }
      }
    }, { root: document, rootMargin: `${MARGIN}px 0px` });
    const chunks = [];
    for (let from = 0; from < items.length; from += size) {
      const chunk = make("div");
      chunk.dataset.from = from;
      chunk.style.height = `${guess * Math.min(size, items.length - from)}px`;
      chunks.push(chunk);
    }
    parent.append(...chunks);
    queueMicrotask(() => {  // by then the parent is in the page: fill what is in view before it is painted
      for (const chunk of chunks) {
        const box = chunk.getBoundingClientRect();
        if (box.top > innerHeight + MARGIN) break;
        if (box.bottom > -MARGIN && box.width) fill(chunk);
      }
      for (const chunk of chunks) watcher.observe(chunk);
    });
  };

  const explore = (root, section, data) => {
    const at = (id) => root.getElementById(id);
    const { arms, runs, texts, turns } = data;
    const groups = data.groups.map(([arm, run, step, id, prompt, answer, right, count, kept, level, stat, why, rows]) => ({
      arm, run, step, prompt, answer, right, count, kept, level, stat, why, id,
      key: `${arms[arm]}\n${runs[run]}\n${step}\n${id}`,
      rows: rows && rows.map(([text, reward, count, kept, advantage, facts, numbers, talk]) => ({
        text, reward, count, kept, advantage, facts, numbers, talk })),
    }));
    const prompts = new Map();
    for (const group of groups) {
      if (!prompts.has(group.prompt)) prompts.set(group.prompt, []);
      prompts.get(group.prompt).push(group);
    }

    // ---------------------------------------------------------------- the search
    let pattern = null, found = [], wanted = {};
    const search = (text) => {
      pattern = text ? new RegExp(text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "giu") : null;
      found = [];
    };
    const hit = (id) => (found[id] ??= texts[id].search(pattern) >= 0);
    const hitTurns = (talk) => talk !== null && turns[talk][0].some(([who, said, calls]) => hit(said) || hit(calls) || hit(who));
    const hitRow = (row) => hit(row.text) || hitTurns(row.talk);
    const marked = (text) => {
      if (!pattern) return [text];
      const parts = [];
      let from = 0;
      for (const match of text.matchAll(pattern)) {
        parts.push(text.slice(from, match.index), make("mark", "", match[0]));
        from = match.index + match[0].length;
        if (parts.length > 40) break;
      }
      return [...parts, text.slice(from)];
    };
    const pre = (name, text) => make("pre", name, ...marked(text));

    // ---------------------------------------------------------------- one rollout, one group
    const turnElement = ([who, said, calls, reward, cut, long]) => {
      const head = make("h4", "", ...marked(texts[who]), reward === null ? null : make("span", "", ` reward ${number(reward, 3)}`));
      const parts = [];
      if (texts[said]) parts.push(pre("", texts[said]));
      if (texts[calls]) parts.push(pre("call", texts[calls]));
      if (cut) parts.push(make("p", "", `… (${cut} more characters)`));
      if (!long) return make("li", "", head, ...parts);
      const folded = make("details", "", make("summary", "", ...parts));
      folded.open = pattern !== null && (hit(said) || hit(calls));
      return make("li", "", head, folded);
    };
    const talkElement = (talk) => {
      const [shown, hidden] = turns[talk];
      const items = shown.map(turnElement);
      if (hidden) items.splice(-1, 0, make("li", "", make("p", "", `… (${hidden} more messages)`)));
      return make("ol", "", ...items);
    };
    const sign = (value) => (value === null ? "" : `${value < 0 ? "" : "+"}${value.toFixed(2)}`);
    const rowElement = (row, place) => {
      const mark = row.kept === 0 ? "○" : row.kept === row.count ? "●" : "◐";
      const text = row.talk === null ? pre("", texts[row.text]) : pre("one", texts[row.text]);
      const many = row.count > 1 ? make("span", "x", `${row.count} ×`) : make("span", "x");
      if (row.count > 1) many.title = `${row.count} equal rollouts, ${row.kept} kept`;
      const line = make("summary", "", make("span", "m", mark), make("span", "n", number(row.reward, 3)),
        make("span", "a", sign(row.advantage)), many, text);
      const box = make("details", row.kept ? "r k" : "r", line);
      const names = `${row.numbers.join(", ")}${row.count > row.numbers.length ? ", …" : ""}`;
      const which = row.count > 1 ? `${row.count} equal rollouts (${names}), ${row.kept} kept` : `rollout ${names}`;
      const key = `${place}\n${row.numbers[0]}`;
      const fill = () => {
        if (!box.open || box.childElementCount > 1) return;
        if (row.talk !== null) box.append(talkElement(row.talk));
        box.append(make("p", "", [which, texts[row.facts]].filter(Boolean).join(" · ")));
      };
      box.open = state.rows.get(key) ?? (pattern !== null && hitRow(row));
      fill();
      line.addEventListener("click", () => state.rows.set(key, !box.open));
      box.addEventListener("toggle", fill);
      return box;
    };
    const strip = (group) => {
      const box = make("span", "strip");
      box.setAttribute("aria-hidden", "true");
      const rewards = (group.rows ?? []).map((row) => row.reward).filter((reward) => reward !== null);
      const low = Math.min(...rewards), high = Math.max(...rewards);
      const bars = [];
      for (const row of group.rows ?? []) {
        const height = row.reward === null ? 0 : high > low ? 12 + (88 * (row.reward - low)) / (high - low) : 50;
        for (const [count, kept] of [[row.kept, true], [row.count - row.kept, false]]) {
          const last = bars.at(-1);
          if (last && last.height === height && last.kept === kept) last.count += count;
          else if (count) bars.push({ height, kept, count });
        }
      }
      for (const { height, kept, count } of bars) {
        const bar = make("i", kept ? "k" : "");
        bar.style.height = `${height}%`;
        bar.style.flexGrow = count;
        box.append(bar);
      }
      return box;
    };
    const list = (group, rows, place) => {
      if (!group.rows) return [make("p", "note", "The rollouts of this group are not on this page: see the note above.")];
      const head = make("div", "cols", ...["", "reward", "adv.", "", "rollout"].map((name) => make("span", "", name)));
      head.setAttribute("aria-hidden", "true");
      const box = make("div", "rows");
      virtual(box, rows, 25, 30, (row) => rowElement(row, place));
      return [head, box];
    };
    const whyElement = (group) => make("ul", "why", ...texts[group.why].split("\n").filter(Boolean).map((line) => make("li", "", line)));
    const rate = (group) => (group.right === null ? null : group.right / Math.max(group.count, 1));
    const groupElement = ({ group, rows }) => {
      const where = make("span", "where", make("b", "", arms[group.arm]), ` step ${group.step} · ${runs[group.run]} · group ${group.id}`);
      const line = oneLine(texts[group.prompt]);
      const gist = make("span", "gist", ...marked(line.length > 90 ? `…${line.slice(-89)}` : line));
      const head = make("summary", "", where, gist, make("span", "stat", group.stat), strip(group));
      const box = make("details", "g", head);
      const fill = () => {
        if (!box.open || box.childElementCount > 1) return;
        const prompt = make("div", "prompt", make("h3", "", "Prompt"), pre("", texts[group.prompt]));
        if (texts[group.answer]) prompt.append(make("h3", "", "Gold answer"), pre("", texts[group.answer]));
        const other = prompts.get(group.prompt).length - 1;
        const button = make("button", "", other ? `This prompt over steps and arms (${plural(other, "other group")})` : "This prompt alone");
        button.type = "button";
        button.addEventListener("click", () => choosePrompt(group));
        prompt.append(make("h3", "", "Why these were kept"), whyElement(group), button);
        box.append(prompt, ...list(group, rows, group.key));
      };
      box.open = state.open.get(group.key) ?? (wanted.deep || group === groups[0]);
      fill();
      head.addEventListener("click", () => state.open.set(group.key, !box.open));
      box.addEventListener("toggle", fill);
      return box;
    };

    // ---------------------------------------------------------------- the filters
    const filter = at("filter"), fields = [...filter.querySelectorAll("select, input")];
    for (const [id, names] of [["f-arm", arms], ["f-run", runs]]) {
      at(id).replaceChildren(new Option("all", ""), ...names.map((name, place) => new Option(name, place)));
    }
    const read = () => {
      const value = (id) => at(id).value, limit = (id, otherwise) => (value(id) === "" ? otherwise : Number(value(id)));
      search(value("f-text").trim());
      wanted = {
        arm: value("f-arm"), run: value("f-run"), kept: value("f-kept"),
        from: limit("f-from", -Infinity), to: limit("f-to", Infinity),
        low: limit("f-low", -Infinity), high: limit("f-high", Infinity),
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
      for (const group of groups) {
        if ((wanted.arm !== "" && group.arm !== Number(wanted.arm)) || (wanted.run !== "" && group.run !== Number(wanted.run))
          || group.step < wanted.from || group.step > wanted.to) continue;
        const inPrompt = !pattern || hit(group.prompt) || hit(group.answer);
        let rows = group.rows ?? [], count = 0;
        if (wanted.deep) rows = rows.filter((row) => countOf(row) && (inPrompt || hitRow(row)));
        for (const row of rows) count += countOf(row);
        if (!count && (wanted.deep || group.rows)) continue;
        rollouts += count;
        shown.push({ group, rows });
      }
      at("f-count").textContent = shown.length
        ? `${shown.length} of ${groups.length} groups, ${rollouts} rollouts` : "No rollout matches.";
      const box = at("ledger-groups");
      box.replaceChildren();
      virtual(box, shown, wanted.deep ? 3 : 12, wanted.deep ? 600 : 100, groupElement);
    };
    const remember = () => {
      for (const field of fields) state.fields[field.id] = field.selectedOptions?.[0].textContent ?? field.value;
    };
    const recall = () => {
      for (const field of fields) {
        const kept = state.fields[field.id];
        if (kept === undefined) continue;
        if (!field.options) field.value = kept;
        else field.value = [...field.options].find((option) => option.textContent === kept)?.value ?? "";
      }
    };
    let timer = 0;
    filter.addEventListener("input", () => {
      remember();
      state.open.clear();
      state.rows.clear();
      clearTimeout(timer);
      timer = setTimeout(apply, 120);
    });
    at("f-clear").addEventListener("click", () => {
      for (const field of fields) field.value = "";
      remember();
      state.open.clear();
      state.rows.clear();
      clearTimeout(timer);
      apply();
    });

    // ---------------------------------------------------------------- one prompt: its history, two arms side by side
    const choosePrompt = (group) => {
      const other = prompts.get(group.prompt).find((found) => found.arm !== group.arm);
      state.prompt = texts[group.prompt];
      state.sides = [group.key, other?.key ?? null];
      showPrompt();
      at("one-prompt").scrollIntoView();
    };
    const sideElement = (history, side) => {
      const key = state.sides[side];
      const present = [...new Set(history.map((group) => group.arm))];
      const chosen = history.find((group) => group.key === key) ?? history.find((group) => group.arm === present[side]);
      if (!chosen) return null;
      const pick = make("select", "", ...present.map((arm) => new Option(arms[arm], arm, false, arm === chosen.arm)));
      pick.setAttribute("aria-label", "arm");
      pick.addEventListener("change", () => go(history.find((group) => group.arm === Number(pick.value))));
      const go = (group) => { state.sides[side] = group.key; showPrompt(); };
      const strip = make("div", "steps");
      for (const group of history.filter((group) => group.arm === chosen.arm)) {
        const share = rate(group), bar = make("i", group.level ? "" : "k");
        bar.style.height = `${share === null ? 50 : 6 + 94 * share}%`;
        const button = make("button", group === chosen ? "now" : "", bar);
        button.type = "button";
        button.title = `step ${group.step}, ${runs[group.run]}: ${share === null ? "" : `${percent(share)} right, `}kept ${group.kept} of ${group.count}${group.level ? ", dead: equal rewards" : ""}`;
        button.setAttribute("aria-label", button.title);
        button.addEventListener("click", () => go(group));
        strip.append(button);
      }
      const share = rate(chosen);
      const head = `step ${chosen.step} · ${runs[chosen.run]} · ${share === null ? "" : `${percent(share)} right · `}${chosen.stat}`;
      return make("div", "side", make("p", "", pick), strip, make("p", "note", head), whyElement(chosen),
        ...list(chosen, chosen.rows, `side ${side} ${chosen.key}`));
    };
    const showPrompt = () => {
      const box = at("one-prompt"), id = state.prompt === null ? -1 : texts.indexOf(state.prompt), history = prompts.get(id);
      box.hidden = !history;
      box.replaceChildren();
      if (!history) return;
      const kept = pattern;
      pattern = null;
      const close = make("button", "", "close");
      close.type = "button";
      close.addEventListener("click", () => { state.prompt = null; showPrompt(); });
      box.append(make("h3", "", "One prompt over its steps ", close), pre("", texts[id]),
        make("p", "note", "Each bar is a logged group: its height is the share of right answers, orange where rewards differ, grey where they are all equal (dead). Choose one."),
        make("div", "sides", ...[0, 1].map((side) => sideElement(history, side)).filter(Boolean)));
      pattern = kept;
    };

    // ---------------------------------------------------------------- prompts by difficulty
    const kindOf = (own) => {
      if (own.every((group) => group.right === null)) return own.every((group) => group.level) ? "dead" : "live";
      const right = own.reduce((sum, group) => sum + group.right, 0), all = own.reduce((sum, group) => sum + group.count, 0);
      return right === 0 ? "dead" : right === all ? "solved" : "live";
    };
    const showPrompts = () => {
      const box = at("prompt-rows"), order = ["dead", "live", "solved"];
      const rows = [...prompts].map(([id, history]) => {
        const own = arms.map((_, arm) => history.filter((group) => group.arm === arm));
        const kinds = own.map((found) => (found.length ? kindOf(found) : null));
        return { id, history, own, kinds, rank: Math.min(...kinds.map((kind) => (kind ? order.indexOf(kind) : 9))) };
      }).filter((row) => !state.kind || row.kinds.includes(state.kind)).sort((a, b) => a.rank - b.rank || b.history.length - a.history.length);
      box.replaceChildren();
      at("prompt-count").textContent = plural(rows.length, "prompt");
      virtual(box, rows, 40, 54, ({ id, history, own, kinds }) => {
        const line = oneLine(texts[id]);
        const about = own.map((found, arm) => {
          if (!found.length) return null;
          const right = found.reduce((sum, group) => sum + (group.right ?? 0), 0), all = found.reduce((sum, group) => sum + group.count, 0);
          const share = found[0].right === null ? "" : ` ${right} of ${all} right`;
          return make("span", kinds[arm], `${arms[arm]}: ${kinds[arm]},${share} in ${plural(found.length, "group")} `);
        });
        const button = make("button", "p", make("span", "gist", line.length > 120 ? `…${line.slice(-119)}` : line), make("span", "stat", ...about));
        button.type = "button";
        button.addEventListener("click", () => choosePrompt(history[0]));
        return button;
      });
    };
    const kind = at("prompt-kind");
    kind.value = state.kind;
    kind.addEventListener("change", () => { state.kind = kind.value; showPrompts(); });
    const all = at("prompts");
    all.addEventListener("toggle", () => { state.listed = all.open; if (all.open) showPrompts(); });
    all.open = state.listed ?? false;

    recall();
    apply();
    showPrompt();
    for (const element of section.querySelectorAll(".scripted")) element.hidden = false;
    for (const element of section.querySelectorAll(".plain-only")) element.hidden = true;
  };

  return (root) => {
    const section = root.getElementById("ledger"), found = root.getElementById("ledger-data");
    if (!section || !found || found === island) return;
    island = found;
    explore(root, section, JSON.parse(found.textContent));
  };
})());
