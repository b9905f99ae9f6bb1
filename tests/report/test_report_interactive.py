"""The figures that the page's script draws: their data, in Chromium, and those for a paper."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from conftest import write_run
from test_report_browser import drive
from tests.chromium import CHROMIUM, MISSING

from pods_rl.errors import UserError
from pods_rl.report import ReportFiles, build_report
from pods_rl.report.interactive import MOST_SEEDS, charts
from pods_rl.report.pages import island
from pods_rl.report.plots import NARROW, WIDE, Bar, threshold_figure, to_bytes

in_chromium = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("uPlot.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
        ("uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
    ],
)
def test_the_library_of_the_figures_is_the_published_one(name: str, sha256: str) -> None:
    content = files("pods_rl.report").joinpath("vendor", name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == sha256


@pytest.mark.parametrize("text", ["</script><b>", "<!--", "&amp;", "\u2028\u2029", "é\x00"])
def test_nothing_in_an_island_ends_it(text: str) -> None:
    page = str(island("x", {"a": [text, 1.5, None]}))
    inside = page.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == {"a": [text, 1.5, None]}


def test_nan_and_infinity_are_null_in_an_island() -> None:
    page = str(island("x", {"a": [float("nan"), (1.0, float("-inf"))], "b": {"c": float("inf")}, "d": "NaN"}))
    assert '{"a":[null,[1.0,null]],"b":{"c":null},"d":"NaN"}' in page


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_bar_s_text_stays_within_the_figure(width: float) -> None:
    text = "60.1 min  1.00x [0.00, 1.09], not settled"
    bars = [Bar("grpo (16)", 3600, "60.0 min", "baseline"), Bar("pods (64→16)", 3606, text)]
    figure = threshold_figure(bars, horizon=3600, title="to 99 % of peak", width=width)
    to_bytes(figure, "png")
    for entry in figure.axes[0].texts:
        assert entry.get_window_extent().x1 <= figure.bbox.x1
    assert figure.axes[0].patches[0].get_window_extent().width > 0.15 * figure.bbox.width


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """Two arms of two runs; an arm's name holds markup."""
    root = tmp_path_factory.mktemp("interactive") / "runs"
    for arm in ("grpo", "<b>pods</b>"):
        for seed in (1, 2):
            path = write_run(root / arm.replace("/", "") / f"seed-{seed}", "pods", seed, end=60)
            rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
            rows = [{**row, "pods/tokens/generated": 10.0, "pods/tokens/trained": 4.0} for row in rows]
            (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_report(root, resamples=10, figures=["pdf", "svg"])


def test_a_curve_over_steps_and_tokens_is_that_over_time(report: ReportFiles) -> None:
    (chart,) = charts(report.analysis)["curves"]
    assert [key for key, _ in chart["x"]] == ["time", "step", "generated", "trained"]
    arm = chart["arms"][0]
    lines, run = arm["lines"], report.analysis.arms[0].runs[0]
    steps = [row["step"] for row in run.evals]
    logged = [min(step, run.metrics[-1]["step"]) for step in steps]
    name, xs, ys = lines["step"]["seeds"][0]
    assert (name, xs) == ("1", steps)
    assert ys == pytest.approx([row["accuracy"] for row in run.evals], rel=1e-4)
    assert lines["generated"]["seeds"][0][1] == pytest.approx([10 * step for step in logged], rel=1e-4)
    assert lines["trained"]["seeds"][0][1] == pytest.approx([4 * step for step in logged], rel=1e-4)
    assert (
        lines["time"]["mean"]
        == lines["trained"]["mean"]
        == pytest.approx(np.mean([s[2] for s in lines["time"]["seeds"]], 0), rel=1e-4)
    )
    assert all(
        low <= mean <= high
        for low, mean, high in zip(*(lines["time"][k] for k in ("low", "mean", "high")), strict=True)
    )


def test_a_run_that_logged_no_tokens_has_no_axis_of_tokens(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "grpo" / "seed-1", "grpo", 1, end=30)
    (chart,) = charts(build_report(tmp_path / "runs", resamples=10).analysis)["curves"]
    assert [key for key, _ in chart["x"]] == ["time", "step"]


def test_of_many_runs_some_are_drawn_and_the_page_says_so(tmp_path: Path) -> None:
    for seed in range(MOST_SEEDS + 3):
        write_run(tmp_path / "runs" / "grpo" / f"seed-{seed}", "grpo", seed, end=15)
    (chart,) = charts(build_report(tmp_path / "runs", resamples=10).analysis)["curves"]
    seeds = [name for name, *_ in chart["arms"][0]["lines"]["time"]["seeds"]]
    assert len(seeds) == MOST_SEEDS
    assert seeds[0] == "0"
    assert f"{MOST_SEEDS} runs" in chart["note"]


def test_figures_for_a_paper_embed_their_fonts(report: ReportFiles) -> None:
    folder = report.folder / "publication"
    assert {path.name for path in folder.glob("*.pdf")} == {f"{name}.pdf" for name in report.images}
    assert {path.name for path in folder.glob("*.svg")} == {f"{name}.svg" for name in report.images}
    content = (folder / "curves.pdf").read_bytes()
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    width = float(re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", content)[1])  # type: ignore[index]
    assert width == pytest.approx(72 * 3.25, abs=1)
    drawn = b"".join(
        zlib.decompress(part) for part in re.findall(rb"stream\r?\n(x.*?)\r?\nendstream", content, re.DOTALL)[:1]
    )
    assert len(set(re.findall(rb"\[[^\]]+\] \d+ d", drawn))) > 2  # a dash for each mean


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "grpo" / "seed-1", "grpo", 1, end=30)
    with pytest.raises(UserError, match=r"--figures gif.*pdf, svg, png"):
        build_report(tmp_path / "runs", figures=["gif"])
    assert not (tmp_path / "runs" / "report").exists()


TOOLS = """
  const refused = []; d.addEventListener("securitypolicyviolation", (e) => refused.push(e.violatedDirective));
  const figure = d.querySelector("figure[data-chart=curves]"), at = (q) => figure.querySelector(q);
  const button = (name) => [...figure.querySelectorAll("button")].find((b) => b.textContent === name);
  const read = () => [...figure.querySelectorAll(".read div")].map((row) => row.textContent);
  const choose = (q, value) => { const s = at(q); s.value = value; s.dispatchEvent(new w.Event("change")); };
  await pause(300);
"""


@in_chromium
def test_the_cursor_shows_the_values_of_each_run(report: ReportFiles, tmp_path: Path) -> None:
    script = (
        TOOLS
        + """
      const over = at(".u-over"), box = over.getBoundingClientRect();
      over.dispatchEvent(new w.MouseEvent("mousemove", {clientX: box.left + 1, clientY: box.top + 20, bubbles: true}));
      await pause(100);
      return [read(), figure.querySelectorAll("canvas").length, getComputedStyle(at("picture")).display, refused];"""
    )
    rows, canvases, picture, refused = drive(report.html, tmp_path, script)
    run = report.analysis.arms[0].runs[0]
    assert rows[0].startswith("grpo")
    assert f"1: {run.evals[0]['accuracy']:.3g}" in rows[0]
    assert "<b>pods<b>" in rows[1]  # as text
    assert (canvases, picture, refused) == (1, "none", [])


@in_chromium
def test_arms_runs_axes_and_smoothing_change_the_figure_and_survive_a_redraw(
    report: ReportFiles, tmp_path: Path
) -> None:
    script = (
        TOOLS
        + """
      const out = [];
      button("grpo (64→16)").click(); await pause(50);
      out.push([read().length, button("grpo (64→16)").getAttribute("aria-pressed"), d.activeElement.textContent]);
      button("2").click(); await pause(50);
      out.push(read()[0].includes("2: "));
      choose("select", "generated"); await pause(50);
      out.push(read()[0]);
      const range = at("input[type=range]"); range.value = 0.5; range.dispatchEvent(new w.Event("input"));
      await pause(50);
      out.push(at("input[type=range]").value);
      for (const start of w.pods) start(d);
      await pause(50);
      const charts = figure.querySelectorAll(".chart").length;
      out.push([charts, read().length, at("select").value, at("input[type=range]").value, refused.length]);
      return out;"""
    )
    arm_off, has_seed, over_tokens, smoothed, after = drive(report.html, tmp_path, script)
    assert arm_off == [2, "false", "grpo (64→16)"]  # the other arm, and the level
    assert has_seed is False
    last = max(line["x"][-1] for line in [charts(report.analysis)["curves"][0]["arms"][1]["lines"]["generated"]])
    assert f"at {last:,.0f}" in over_tokens
    assert smoothed == "0.5"
    assert after == [1, 2, "generated", "0.5", 0]


@in_chromium
def test_a_redraw_keeps_the_zoom_and_leaves_no_plot_behind(report: ReportFiles, tmp_path: Path) -> None:
    """Nothing is drawn again unless its data changed; violations of the policy while the page loaded count too."""
    script = (
        TOOLS
        + """
      new w.ReportingObserver((found) => refused.push(...found.map((one) => one.body.effectiveDirective)),
        {types: ["csp-violation"], buffered: true}).observe();
      const made = [], gone = [], Plot = w.uPlot;
      w.uPlot = function (...given) {
        const plot = new Plot(...given), destroy = plot.destroy;
        made.push(plot);
        plot.destroy = () => { gone.push(plot); destroy(); };
        return plot;
      };
      const again = () => { for (const start of w.pods) start(d); };
      again();
      const unchanged = made.length;
      button("2").click();
      made[made.length - 1].setScale("x", {min: 10, max: 20});  // what a drag calls
      await pause(50);
      const scale = () => { const x = made[made.length - 1].scales.x; return [x.min, x.max].map((v) => v.toFixed(3)); };
      const zoomed = scale();
      const data = d.getElementById("figures-data"), charts = JSON.parse(data.textContent);
      charts.curves[0].arms[0].lines.time.mean[0] = 0.1;
      delete charts.steps;
      d.querySelector("figure[data-chart=steps]").remove();
      const fresh = document.createElement("script");  // of the outer page, which has no policy
      Object.assign(fresh, {type: "application/json", id: data.id, textContent: JSON.stringify(charts)});
      data.replaceWith(d.adoptNode(fresh));
      again(); again();
      await pause(50);
      const kept = scale(), alive = made.length - gone.length;
      return [unchanged, zoomed, kept, alive, button("2").getAttribute("aria-pressed"), refused];"""
    )
    unchanged, zoomed, kept, alive, seed, refused = drive(report.html, tmp_path, script)
    assert unchanged == 0
    assert kept == zoomed == ["10.000", "20.000"]
    assert (alive, seed, refused) == (1, "false", [])


@in_chromium
def test_what_is_saved_is_the_picture_and_its_numbers(report: ReportFiles, tmp_path: Path) -> None:
    script = (
        TOOLS
        + """
      const links = Object.fromEntries([...figure.querySelectorAll(".save a")].map((a) => [a.textContent, a]));
      let blob = null; w.URL.createObjectURL = (given) => { blob = given; return "#"; };
      links.CSV.addEventListener("click", (e) => e.preventDefault());
      links.CSV.click();
      return [links.SVG.href.slice(0, 26), links.PDF.href.slice(0, 28), links.SVG.download, await blob.text()];"""
    )
    svg, pdf, name, csv = drive(report.html, tmp_path, script)
    assert (svg, pdf, name) == ("data:image/svg+xml;base64,", "data:application/pdf;base64,", "curves.svg")
    rows = csv.splitlines()
    assert rows[0] == '"arm","run","training time (s)","accuracy"'
    curves = [arm.curve for arm in report.analysis.arms if arm.curve]
    assert len(rows) == 1 + sum(curve.scores.size + len(curve.times) for curve in curves)
