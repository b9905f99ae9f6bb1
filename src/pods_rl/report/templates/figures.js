(() => {
  // By name of the figure, so that it survives a page whose parts are exchanged while runs train.
  const memory = {};
  const INK = "#3c4043", GRID = "#e6e8ea";  // as in the pictures; the style sheet inverts both in the dark
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  const text = (value, digits = 3) => value == null ? "–" : Number(value.toPrecision(digits)).toLocaleString("en");
  const faded = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

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

  const draw = (figure, charts) => {
    const name = figure.dataset.chart;
    const state = memory[name] ??= { panel: 0, x: null, smooth: 0, seeds: true, off: new Set(), offSeeds: new Set(), zoom: null };
    const given = JSON.stringify(charts);
    if (state.given === given && state.box.parentNode === figure) return;  // drawn already
    state.stop?.();  // a plot listens to the window until it is destroyed
    state.panel = Math.min(state.panel, charts.length - 1);
    figure.querySelector(".chart")?.remove();
    const box = element("div", { className: "chart" }), plot = element("div", { className: "plot", tabIndex: 0 });
    const bar = element("div", { className: "bar" }), arms = element("div", { className: "bar" });
    const read = element("div", { className: "read" });
    read.setAttribute("aria-live", "polite");
    box.append(bar, arms, plot, read);
    figure.prepend(box);
    figure.classList.add("live");
    let drawn = null, x = null, chart = null;

    const make = () => {
      chart = charts[state.panel];
      x = chart.x.find(([key]) => key === state.x) ?? chart.x[0];
      const lines = [];  // of the plot: one entry for each series after the x axis
      const bands = [];
      for (const arm of chart.arms) {
        const at = arm.lines[x[0]], shown = !state.off.has(arm.label), look = { stroke: arm.colour, dash: arm.dash };
        for (const [seed, xs, ys] of at.seeds) {
          const drawnToo = shown && state.seeds && !state.offSeeds.has(seed);
          lines.push({ xs, ys, show: drawnToo, stroke: faded(arm.colour, 0.35), width: 1, dash: arm.dash });
        }
        if (at.low.length) {
          const edge = { xs: at.x, show: shown, stroke: "transparent", width: 0 };
          lines.push({ ...edge, ys: at.high }, { ...edge, ys: at.low });
          bands.push({ series: [lines.length - 1, lines.length], fill: faded(arm.colour, 0.13) });
        }
        if (state.smooth) lines.push({ xs: at.x, ys: at.mean, show: shown, stroke: faded(arm.colour, 0.4), width: 1.2 });
        lines.push({ xs: at.x, ys: smooth(at.mean, state.smooth), show: shown, width: 2.4, ...look });
      }
      const xs = [...new Set(lines.flatMap((line) => line.xs.filter((value) => value != null)))].sort((a, b) => a - b);
      const place = new Map(xs.map((value, index) => [value, index]));
      const data = [xs, ...lines.map((line) => {
        const row = new Array(xs.length).fill(null);
        line.xs.forEach((value, index) => { if (value != null) row[place.get(value)] = line.ys[index]; });
        return row;
      })];
      const axis = { stroke: INK, grid: { stroke: GRID, width: 1 }, ticks: { stroke: GRID, width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 22 };
      const options = {
        ...size(), legend: { show: false }, bands,
        cursor: { points: { show: false }, y: false, drag: { x: true, y: false } },
        scales: { x: { time: false } },
        axes: [{ ...axis, label: x[1], size: 40 }, { ...axis, label: chart.y, size: 52 }],
        series: [{}, ...lines.map(({ show, stroke, width, dash }) => ({ show, stroke, width, dash, spanGaps: true, points: { show: xs.length === 1 } }))],
        hooks: { draw: [level], setCursor: [hover], setScale: [(u, key) => {
          if (key === "x") state.zoom = u.scales.x.min > xs[0] || u.scales.x.max < xs[xs.length - 1] ? [u.scales.x.min, u.scales.x.max] : null;
        }] },
      };
      drawn?.destroy();
      const zoom = state.zoom;
      drawn = new uPlot(options, data, plot);
      if (zoom) drawn.setScale("x", { min: zoom[0], max: zoom[1] });
      controls();
      hover(drawn);
    };

    const size = () => {
      const width = Math.max(240, plot.clientWidth || box.clientWidth || 640);
      return { width, height: width < 560 ? 270 : 380 };
    };

    const level = (u) => {
      if (!chart.level) return;
      const y = u.valToPos(chart.level[0], "y", true), { left, width, top, height } = u.bbox;
      if (y < top || y > top + height) return;
      u.ctx.save();
      u.ctx.setLineDash([8, 6]);
      u.ctx.strokeStyle = INK;
      u.ctx.beginPath();
      u.ctx.moveTo(left, y);
      u.ctx.lineTo(left + width, y);
      u.ctx.stroke();
      for (const arm of chart.arms) {  // where a mean reaches the level
        if (arm.crossing == null || x[0] !== "time" || state.off.has(arm.label)) continue;
        const at = u.valToPos(arm.crossing, "x", true);
        if (at < left || at > left + width) continue;
        u.ctx.fillStyle = arm.colour;
        u.ctx.beginPath();
        u.ctx.arc(at, y, 4 * devicePixelRatio, 0, 2 * Math.PI);
        u.ctx.fill();
      }
      u.ctx.restore();
    };

    const hover = (u) => {
      const left = u.cursor.left;
      const last = u.data[0][u.data[0].length - 1];
      const at = left == null || left < 0 ? last : u.posToVal(left, "x");
      read.replaceChildren(...chart.arms.filter((arm) => !state.off.has(arm.label)).map((arm) => {
        const line = arm.lines[x[0]], index = nearest(line.x, line.mean, at);
        const row = element("div", {}, swatch(arm), element("b", { textContent: arm.label }));
        if (index >= 0) row.append(` ${text(line.mean[index])} at ${text(line.x[index], 4)}`);
        if (line.low.length && line.low[index] != null) row.append(` [${text(line.low[index])}, ${text(line.high[index])}]`);
        const seeds = state.seeds ? line.seeds.filter(([seed]) => !state.offSeeds.has(seed)) : [];
        const values = seeds.map(([seed, xs, ys]) => `${seed}: ${text(ys[nearest(xs, ys, at)])}`);
        if (values.length) row.append(element("span", { textContent: ` · runs ${values.join(", ")}` }));
        return row;
      }));
      if (chart.level) read.append(element("div", { textContent: `dashed: ${chart.level[1]}, ${text(chart.level[0])}` }));
    };

    const swatch = (arm) => {
      const made = element("i", { className: "swatch" });
      made.style.background = arm.colour;
      return made;
    };

    const toggle = (label, on, change, ...inside) => {
      const made = element("button", { type: "button", onclick: () => { change(); remake(`[data-key="${CSS.escape(label)}"]`); } }, ...inside, label);
      made.dataset.key = label;
      made.setAttribute("aria-pressed", on);
      return made;
    };
    const flip = (set, key) => () => { if (!set.delete(key)) set.add(key); };
    const remake = (focus) => { make(); box.querySelector(focus)?.focus(); };

    const choice = (label, options, value, change) => {
      const select = element("select", { onchange: () => { change(select.value); remake(`[data-key="${label}"]`); } },
        ...options.map(([key, title]) => element("option", { value: key, textContent: title, selected: String(key) === String(value) })));
      select.dataset.key = label;
      return element("label", {}, `${label} `, select);
    };

    const controls = () => {
      const parts = [];
      if (charts.length > 1) parts.push(choice("figure", charts.map((one, index) => [index, one.y]), state.panel, (value) => { state.panel = Number(value); state.zoom = null; }));
      if (chart.x.length > 1) parts.push(choice("over", chart.x, x[0], (value) => { state.x = value; state.zoom = null; }));
      const range = element("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smooth, oninput: () => { state.smooth = Number(range.value); remake("[data-key=smooth]"); } });
      range.dataset.key = "smooth";
      parts.push(element("label", {}, "smooth ", range));
      const seeds = [...new Set(chart.arms.flatMap((arm) => arm.lines[x[0]].seeds.map(([seed]) => seed)))];
      if (seeds.length) parts.push(toggle("runs", state.seeds, () => { state.seeds = !state.seeds; }));
      if (seeds.length <= 16 && state.seeds) parts.push(...seeds.map((seed) => toggle(seed, !state.offSeeds.has(seed), flip(state.offSeeds, seed))));
      parts.push(element("span", { className: "save" }, "save ", ...saves()));
      bar.replaceChildren(...parts);
      arms.replaceChildren(...chart.arms.map((arm) => toggle(arm.label, !state.off.has(arm.label), flip(state.off, arm.label), swatch(arm))));
      if (chart.note) arms.append(element("span", { textContent: chart.note }));
    };

    const saves = () => {
      const picture = figure.querySelector("img")?.src;
      const links = picture ? [element("a", { textContent: "SVG", download: `${name}.svg`, href: picture })] : [];
      if (figure.dataset.pdf) links.push(" ", element("a", { textContent: "PDF", download: `${name}.pdf`, href: figure.dataset.pdf }));
      const csv = element("a", { textContent: "CSV", download: `${name}.csv`, href: "#", onclick: () => {
        csv.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
        setTimeout(() => URL.revokeObjectURL(csv.href), 10000);
      } });
      return [...links, " ", csv];
    };

    const table = () => {
      const quoted = (value) => typeof value === "string" ? `"${value.replaceAll('"', '""')}"` : value ?? "";
      const rows = [["arm", "run", x[1], chart.y]];
      for (const arm of chart.arms) {
        const line = arm.lines[x[0]];
        line.x.forEach((value, index) => rows.push([arm.label, "mean", value, line.mean[index]]));
        for (const [seed, xs, ys] of line.seeds) xs.forEach((value, index) => rows.push([arm.label, seed, value, ys[index]]));
      }
      return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
    };

    plot.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const at = drawn.cursor.idx ?? (step > 0 ? -1 : drawn.data[0].length);
      const value = drawn.data[0][Math.max(0, Math.min(drawn.data[0].length - 1, at + step))];
      drawn.setCursor({ left: drawn.valToPos(value, "x"), top: 10 });
    };
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${figure.querySelector("img")?.alt ?? name}; arrow keys move the cursor, drag to zoom, double click to reset`);
    make();
    const resized = new ResizeObserver(() => { if (box.isConnected && drawn.width !== size().width) drawn.setSize(size()); });
    resized.observe(box);
    const stop = () => { resized.disconnect(); drawn.destroy(); };
    Object.assign(state, { given, box, stop });
  };

  (window.pods ??= []).push((root) => {
    const data = root.getElementById("figures-data");
    if (!data || !window.uPlot) return;
    const found = JSON.parse(data.textContent);
    for (const figure of root.querySelectorAll("figure[data-chart]")) draw(figure, found[figure.dataset.chart]);
  });
})();
