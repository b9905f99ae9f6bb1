// Draws the figures. `pods.figures(data)` can be called again with new points: what the reader chose stays.
window.pods = { figures: (() => {
  const pageColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const FEW = 12;  // points of a line: fewer are not smoothed
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  const text = (value, digits = 3) => {
    if (value == null) return "–";
    const short = Number(value.toPrecision(digits));
    if (short !== 0 && Math.abs(short) < 1e-3) return short.toExponential();  // a learning rate
    return short.toLocaleString("en", { maximumFractionDigits: 6 });
  };
  const faded = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const swatch = (arm) => {
    const made = element("i", { className: "swatch" });
    made.style.background = arm.colour;
    return made;
  };

  // An exponential mean that corrects its start; what is missing stays missing.
  const smooth = (values, share) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null || !share) return value;
      sum = share * sum + (1 - share) * value;
      weight = share * weight + (1 - share);
      return sum / weight;
    });
  };

  const nearest = (xs, ys, x) => {
    let best = -1;
    xs.forEach((at, index) => {
      if (at != null && ys[index] != null && (best < 0 || Math.abs(at - x) < Math.abs(xs[best] - x))) best = index;
    });
    return best;
  };

  const open = (figure) => {
    const state = { metric: null, x: null, smooth: Number(figure.dataset.smooth ?? 0), seeds: null, off: new Set(), zoom: null, log: false };
    const choices = element("span"), range = element("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smooth });
    const toggles = element("span"), arms = element("div", { className: "bar" });
    const plot = element("div", { className: "plot", tabIndex: 0 }), read = element("div", { className: "read" });
    const tip = element("div", { className: "tip", hidden: true }), slider = element("label", {}, "smooth ", range);
    const reset = element("button", { type: "button", textContent: "reset zoom", hidden: true, onclick: () => { state.zoom = null; redraw(); } });
    const data = element("details", { className: "plain data", ontoggle: () => tabulate() }, element("summary", { textContent: "data table" }));
    const save = element("span", { className: "save" }, "save ");
    const bar = element("div", { className: "bar" }, choices, slider, toggles, reset, save);
    figure.prepend(element("div", { className: "chart" }, bar, arms, plot, read, data));
    const points = [];  // of the cursor
    let charts = [], chart = null, x = null, drawn = null, shape = "";

    // An x after the first has only what differs from the first.
    const lineOf = (arm) => ({ ...arm.lines[chart.x[0][0]], ...arm.lines[x[0]] });

    const value = (number) => number != null && chart.bounds ? `${number.toFixed(1)}\u00a0%` : text(number);
    const shown = () => chart.arms.filter((arm) => !state.off.has(arm.label));
    const isLong = () => chart.arms.some((arm) => lineOf(arm).x.length >= FEW);
    const share = () => isLong() ? state.smooth : 0;

    const linesOf = (arm) => {
      const at = lineOf(arm), show = !state.off.has(arm.label), look = { stroke: arm.colour, dash: arm.dash, show };
      const thin = { ...look, stroke: faded(arm.colour, 0.35), width: 1 }, lines = [];
      if (state.seeds) lines.push(...at.seeds.map(([, xs, ys]) => ({ ...thin, xs, ys })));
      if (!chart.crowded && at.low.some((low) => low != null)) {
        const edge = { xs: at.x, show, stroke: "transparent", width: 0 };
        const [high, low] = [at.high, at.low].map((values) => smooth(values, share()));
        lines.push({ ...edge, ys: high, edge: true, fill: faded(arm.colour, 0.13) }, { ...edge, ys: low, edge: true });
      }
      if (share()) lines.push({ ...thin, xs: at.x, ys: at.mean });
      return [...lines, { ...look, xs: at.x, ys: smooth(at.mean, share()), width: 2.4 }];
    };

    const redraw = () => {
      const lines = chart.arms.flatMap(linesOf);
      const xs = [...new Set(lines.flatMap((line) => line.xs.filter((value) => value != null)))].sort((a, b) => a - b);
      const place = new Map(xs.map((value, index) => [value, index]));
      const rows = [xs, ...lines.map((line) => {
        const row = new Array(xs.length).fill(null);
        line.xs.forEach((value, index) => { if (value != null) row[place.get(value)] = line.ys[index]; });
        return row;
      })];
      const font = "12px system-ui, sans-serif", mark = { stroke: pageColour("--line"), width: 1 };
      const axis = { stroke: pageColour("--ink"), grid: mark, ticks: mark, font, labelFont: font, labelSize: 22 };
      const options = {
        ...size(), legend: { show: false },
        bands: lines.flatMap((line, at) => line.fill ? [{ series: [at + 1, at + 2], fill: line.fill }] : []),
        cursor: { points: { show: false }, y: false, drag: { x: true, y: false } },
        scales: { x: { time: false, range: widened }, y: { distr: state.log ? 3 : 1, range: heights } },
        axes: [{ ...axis, label: x[1], size: 40 }, { ...axis, label: chart.y + (share() ? ", smoothed" : ""), size: 56, values: (u, splits) => splits.map((value) => text(value, 8)) }],
        series: [{}, ...lines.map(({ show, stroke, width, dash, edge }) =>
          ({ show, stroke, width, dash, auto: !edge, spanGaps: true, points: { show: xs.length === 1 } }))],
        hooks: { draw: [target], setCursor: [hover], setScale: [(u, key) => {
          if (key !== "x") return;
          state.zoom = u.scales.x.min > xs[0] || u.scales.x.max < xs.at(-1) ? [u.scales.x.min, u.scales.x.max] : null;
          reset.hidden = !state.zoom;
        }] },
      };
      const zoom = state.zoom;
      drawn?.destroy();
      drawn = new uPlot(options, rows, plot);
      drawn.over.append(tip);
      if (zoom) drawn.setScale("x", { min: zoom[0], max: zoom[1] });
      hover(drawn);
      tabulate();
    };

    // The values of the lines within the window, and the target. A wide band does not make lines flat, and is cut.
    const heights = (u, low, high) => {
      if (low == null) return state.log ? [1, 10] : [0, 1];  // nothing is drawn; a log scale has no 0
      if (chart.target && !state.zoom) [low, high] = [Math.min(low, chart.target[0]), Math.max(high, chart.target[0])];
      if (state.log) return [low / 1.2, high * 1.2];
      const room = 0.06 * (high - low) || 0.06 * Math.abs(high) || 1, [least, most] = chart.bounds ?? [-Infinity, Infinity];
      return [Math.max(least, low - room), Math.min(most, high + room)];
    };

    // All of x, or the zoomed part; a single point has room at its right.
    const widened = (u, min, max) => (min !== null && min === max ? [min, max + 1] : [min, max]);

    const size = () => {
      const width = Math.max(240, plot.clientWidth || 640);
      return { width, height: width < 560 ? 270 : 380 };
    };

    const target = (u) => {
      if (!chart.target) return;
      const { left, top, width, height } = u.bbox, y = u.valToPos(chart.target[0], "y", true);
      u.ctx.save();
      u.ctx.beginPath();
      u.ctx.rect(left, top, width, height);
      u.ctx.clip();
      u.ctx.setLineDash([8, 6]);
      u.ctx.strokeStyle = pageColour("--ink");
      u.ctx.beginPath();
      u.ctx.moveTo(left, y);
      u.ctx.lineTo(left + width, y);
      u.ctx.stroke();
      u.ctx.restore();
    };

    const hover = (u) => {
      const left = u.cursor.left, at = left == null || left < 0 ? u.data[0].at(-1) : u.posToVal(left, "x");
      const found = shown().map((arm) => [arm, nearest(lineOf(arm).x, lineOf(arm).mean, at)]);
      read.replaceChildren(...found.map(([arm, index]) => {
        const line = lineOf(arm), [mean, low, high] = [line.mean, line.low, line.high].map((values) => value(values[index]));
        const row = element("div", {}, swatch(arm), element("b", { textContent: arm.label }));
        if (index >= 0) row.append(` ${mean} at ${text(line.x[index], 4)}`);
        if (line.low[index] != null) row.append(` [${low}, ${high}]`);
        const runs = state.seeds ? line.seeds.map(([seed, xs, ys]) => `${seed}: ${value(ys[nearest(xs, ys, at)])}`) : [];
        if (runs.length) row.append(element("span", { textContent: ` · runs ${runs.join(", ")}` }));
        return row;
      }));
      if (chart.target) read.append(element("div", { textContent: `dashed: ${chart.target[1]}, ${value(chart.target[0])}` }));
      if (share()) read.append(element("div", { textContent: "Thick lines are smoothed. These values are not." }));
      tip.hidden = left == null || left < 0;
      for (const point of points.splice(0)) point.remove();
      const drawnPoints = found.filter(([, index]) => index >= 0 && !tip.hidden).map(([arm, index]) => [arm, lineOf(arm).x[index], lineOf(arm).mean[index]]);
      for (const [arm, at, mean] of drawnPoints) {  // on the line's own point, which may lie beside the cursor
        const point = element("i", { className: "point" });
        Object.assign(point.style, { background: arm.colour, left: `${u.valToPos(at, "x")}px`, top: `${u.valToPos(mean, "y")}px` });
        points.push(point);
        u.over.append(point);
      }
      tip.replaceChildren(...drawnPoints.sort((a, b) => b[2] - a[2]).map(([arm, at, mean]) =>
        element("div", {}, swatch(arm), `${value(mean)} ${arm.label} at ${text(at, 4)}`)));
      const isRight = left > u.over.clientWidth / 2;
      Object.assign(tip.style, { left: isRight ? "" : `${left + 12}px`, right: isRight ? `${u.over.clientWidth - left + 12}px` : "" });
    };

    // The means as a table, made when it is open.
    const tabulate = () => {
      if (!data.open) return;
      const row = (tag, cells) => element("tr", {}, ...cells.map((cell) => element(tag, { textContent: cell })));
      const body = element("tbody");
      for (const arm of shown()) {
        const line = lineOf(arm);
        line.x.forEach((at, index) => body.append(row("td", [arm.label, text(at, 4), value(line.mean[index]), line.low[index] == null ? "–" : `${value(line.low[index])} to ${value(line.high[index])}`])));
      }
      const table = element("table", {}, element("thead", {}, row("th", ["arm", x[1], chart.y, "95 % interval"])), body);
      const box = element("div", { className: "scroll", tabIndex: 0 }, table);
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", `${chart.y}, data table`);
      data.replaceChildren(data.firstChild, box);
    };

    const choice = (label, options, value, change) => {
      const select = element("select", { onchange: () => { change(select.value); state.zoom = null; update(charts); } },
        ...options.map(([key, title]) => element("option", { value: key, textContent: title, selected: String(key) === String(value) })));
      return element("label", {}, `${label} `, select);
    };
    const toggle = (label, on, change, ...inside) => {
      const made = element("button", { type: "button", onclick: () => {
        made.setAttribute("aria-pressed", change());
        redraw();
      } }, ...inside, label);
      made.setAttribute("aria-pressed", on);
      return made;
    };
    const controls = () => {
      choices.replaceChildren();
      toggles.replaceChildren();
      if (charts.length > 1) choices.append(choice("figure", charts.map((one) => [one.metric, one.y]), chart.metric, (value) => { state.metric = value; }));
      if (chart.x.length > 1) choices.append(choice("over", chart.x, x[0], (value) => { state.x = value; }));
      if (chart.arms.some((arm) => lineOf(arm).seeds.length)) toggles.append(toggle("runs", state.seeds, () => (state.seeds = !state.seeds)));
      const lows = chart.arms.flatMap((arm) => [...lineOf(arm).mean, ...lineOf(arm).seeds.flatMap(([, , ys]) => ys)]);
      if (lows.some((low) => low > 0) && lows.every((low) => low == null || low > 0)) toggles.append(toggle("log scale", state.log, () => (state.log = !state.log)));
      else state.log = false;
      slider.hidden = !isLong();
      arms.replaceChildren(...chart.arms.map((arm) => toggle(arm.label, !state.off.has(arm.label), () => {
        if (!state.off.delete(arm.label)) state.off.add(arm.label);
        return !state.off.has(arm.label);
      }, swatch(arm))));
    };

    const update = (given) => {
      charts = given;
      chart = charts.find((one) => one.metric === state.metric) ?? charts[0];
      x = chart.x.find(([key]) => key === state.x) ?? chart.x[0];
      state.seeds ??= !chart.crowded;
      const now = JSON.stringify([charts.map((one) => one.y), chart.x, x, chart.arms.map((arm) => [arm.label, arm.colour, lineOf(arm).seeds.length, lineOf(arm).x.length >= FEW])]);
      if (now !== shape) controls();
      shape = now;
      redraw();
    };

    const table = () => {
      // A spreadsheet would run such a name as a formula.
      const safe = (name) => /^'*\s*[=+\-@＝＋－＠]/.test(name) ? `'${name}` : name;
      const quoted = (value) => typeof value === "string" ? `"${safe(value).replaceAll('"', '""')}"` : value ?? "";
      const rows = [["arm", "run", x[1], chart.y]];
      for (const arm of chart.arms) {
        const line = lineOf(arm);
        for (const [run, xs, ys] of [["mean", line.x, line.mean], ...line.seeds]) xs.forEach((value, at) => rows.push([arm.label, run, value, ys[at]]));
      }
      return `data:text/csv;charset=utf-8,${encodeURIComponent(rows.map((row) => row.map(quoted).join(",")).join("\n"))}`;
    };
    const picture = () => {
      const shown = plot.querySelector("canvas"), { width, height } = shown;
      const copy = element("canvas", { width, height }), pen = copy.getContext("2d");
      pen.fillStyle = pageColour("--page");  // the page's colours are unreadable on another background
      pen.fillRect(0, 0, width, height);
      pen.drawImage(shown, 0, 0);
      return copy.toDataURL();
    };
    for (const [kind, make] of [["csv", table], ["png", picture]]) {
      const link = element("a", { textContent: kind.toUpperCase(), href: "#", download: `${figure.dataset.chart}.${kind}`, onclick: () => { link.href = make(); } });
      save.append(link, " ");
    }
    range.setAttribute("aria-label", "smoothing");
    // only the plot is drawn again, so the slider stays where the reader drags it
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (chart) redraw(); });
    range.oninput = () => { state.smooth = Number(range.value); redraw(); };
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", "Figure. The left and right arrow keys move from evaluation to evaluation.");
    read.setAttribute("role", "status");
    read.setAttribute("aria-live", "off");  // while a mouse moves
    // An arrow key moves to the next point of the longest line: lines of other arms have theirs nearby.
    plot.onkeydown = (event) => {
      const lines = shown().map((arm) => lineOf(arm).x.filter((at) => at != null));
      const values = lines.reduce((longest, line) => line.length > longest.length ? line : longest, []);
      const left = drawn.cursor.left, end = values.length - 1;
      const here = left == null || left < 0 ? null : nearest(values, values, drawn.posToVal(left, "x"));
      const to = { ArrowLeft: (here ?? end + 1) - 1, ArrowRight: (here ?? -1) + 1, Home: 0, End: end }[event.key];
      if (to === undefined || end < 0) return;
      event.preventDefault();
      read.setAttribute("aria-live", "polite");
      drawn.setCursor({ left: drawn.valToPos(values[Math.max(0, Math.min(end, to))], "x"), top: 10 });
    };
    plot.onmousemove = () => read.setAttribute("aria-live", "off");
    new ResizeObserver(() => { if (drawn && drawn.width !== size().width) drawn.setSize(size()); }).observe(plot);
    return update;
  };

  const opened = new WeakMap();
  return (data) => {
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      if (!data[figure.dataset.chart]) continue;
      if (!opened.has(figure)) opened.set(figure, open(figure));
      opened.get(figure)(data[figure.dataset.chart]);
    }
  };
})() };
