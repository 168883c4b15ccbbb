"""Tests of the page's HTML: complete, safely escaped, and readable with little data."""

from __future__ import annotations

import html
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from contrast import contrast
from experiments_on_disk import CLASSIC, falling, read_comparison, write_experiment
from paceline.analysis.comparison import Comparison
from paceline.analysis.curves import relative_difference, thinned
from paceline.analysis.statistics import Estimate
from paceline.errors import PacelineError
from paceline.records.experiment.design import Candidate
from paceline.report.figures.candidates import CANDIDATE_FIGURES
from paceline.report.figures.columns import page_columns
from paceline.report.figures.ranks import RANK_FIGURES
from paceline.report.figures.steps import SPLIT_FIGURES
from paceline.report.page.comparison import DEFINITIONS, all_plots, comparison_table, render, write_page
from paceline.report.page.document import breakable, longest_part
from paceline.report.plots.drawing import plain, short_names
from paceline.report.plots.palette import colours
from paceline.report.tables.steps import split_rows
from paceline.report.terminal.comparison import to_json
from paceline.report.verdict.sentences import sentences

pytestmark = pytest.mark.takes(7)

MOST_BYTES = 6_000_000
NASTY = "<script>alert(1)</script>"


def comparison_of(tmp_path: Path, *args: Any, **kwargs: Any) -> Comparison:
    return read_comparison(write_experiment(tmp_path / "experiment", *args, **kwargs))


class Reader(HTMLParser):
    """Elements, scripts, data and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.data = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = "data" if ("type", "application/json") in attrs else tag
        if self._inside == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "data":
            self.data += data
        elif self._inside != "style":
            self.text += data


def many(count: int) -> list[Candidate]:
    options = "gradient_as_bucket_view=true"
    return [Candidate(f"ddp:bucket_mb={n},{options} lr=0.{n:02d}", "ddp", {"lr": n / 100}) for n in range(1, count + 1)]


def test_the_page_says_what_the_comparison_says(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, events=True)
    page = Reader(render(comparison))
    seen = " ".join(page.text.split())
    for part in sentences(comparison)[0].split(": ", 1) + sentences(comparison)[1:]:
        assert part in seen
    for column in comparison_table(comparison).columns:
        assert all(cell.text in seen and cell.interval in seen for cell in column.cells), column.key
    for definition in DEFINITIONS.values():
        assert definition.text in seen
    assert "paceline compare --ranks 2" in seen
    assert comparison.record_set.sources[0] in seen
    assert "2 January 2026" in seen


def test_one_plotly_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = render(comparison_of(tmp_path))
    page = Reader(text)
    assert [script.count("plotly.js v") for script in page.scripts] == [1, 0]
    assert len(text.encode()) < MOST_BYTES
    fetched = [value for name, value in page.attributes if name in ("src", "srcset", "data", "action")]
    links = [value for name, value in page.attributes if name == "href" and value and value[0] != "#"]
    assert (fetched, links) == ([], ["data:,"])
    policy = next(value for name, value in page.attributes if value and value.startswith("default-src"))
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy


def test_names_given_by_users_are_escaped(tmp_path: Path) -> None:
    names = [f"{NASTY} {n}" for n in range(2)]
    candidates = [Candidate(name, "ddp") for name in names]
    comparison = comparison_of(
        tmp_path,
        [*candidates, Candidate("p2p", "p2p")],
        events=True,
        failures={"p2p": f"rank 1 said {NASTY}"},
        settings={"workload": f"my:{NASTY}"},
        provenance={"command": f"paceline compare 'my:{NASTY}' \u2028", "host": NASTY},
    )
    text = render(comparison)
    assert NASTY not in text
    page = Reader(text)
    assert page.tags.count("script") == 3
    assert page.text.count(NASTY) > 8, "shown in the title, tables, failures, commands and provenance"
    content = json.loads(page.data)
    assert not re.search("[<>&\u2028\u2029]", page.data)
    assert [entry["name"] for entry in content["candidates"]] == [*names, "p2p"]
    drawn = [value for value in strings(content["figures"]) if "alert" in value and value not in names]
    assert drawn
    assert all("<" not in value.replace("<br>", "").replace("<extra></extra>", "") for value in drawn)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [found for item in items for found in strings(item)]


def test_plotly_gets_no_tags_and_no_templates() -> None:
    assert plain("<b>x</b> & %{y}") == "&lt;b&gt;x&lt;/b&gt; &amp; %&#123;y}"
    assert html.unescape(plain("<b>x</b> & %{y}")) == "<b>x</b> & %{y}"


@pytest.mark.parametrize("steps", [3, 2000])
def test_long_runs_of_many_candidates_stay_small(tmp_path: Path, steps: int) -> None:
    comparison = comparison_of(tmp_path, many(14), repeats=3, steps=steps, events=steps < 1000)
    assert len(render(comparison).encode()) < MOST_BYTES
    drawn = all_plots(comparison)
    assert all(len(trace["x"]) <= 600 for figure in drawn.values() for trace in figure["data"])
    assert all(len(figure["views"]) > 1 for name, figure in drawn.items() if name in ("split", "timeline"))
    assert all(len(trace["x"]) >= min(steps, 40) for trace in drawn["losses"]["data"])


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    values = [math.sin(step / 7) for step in range(10_000)]
    values[1234], values[4321], values[7777] = 50.0, -50.0, math.nan
    kept = thinned(values, 300)
    assert len(kept) <= 300
    assert {0, 9999, 1234, 4321, 7777} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(values[:300], 300) == list(range(300))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            {"candidates": CLASSIC[3:], "repeats": 1},
            ["no other distributed candidate was measured", "One repeat gives no interval"],
        ),
        ({"accuracy": None, "repeats": 3}, ["Of the distributed strategies, pick allreduce"]),
        ({"candidates": [CLASSIC[0], *CLASSIC[2:]]}, ["baseline"]),
        ({"failures": {"ddp": "rank 1 died."}}, ["Failed and left out", "rank 1 died.", "try again"]),
        ({"repeats": 0, "interrupted": True, "proof": False}, ["interrupted", "Nothing was measured yet."]),
        ({"candidates": many(14), "repeats": 3}, ["Pick ddp:bucket_mb=1"]),
        (
            {"losses": lambda *_: math.nan},
            ["diverged at step 0 (seed 0) and step 0 (seed 1), 2 of 2 repeats: the loss is not finite"],
        ),
        ({"losses": lambda c, r, s: 1e30 if s == 7 else falling(c, r, s), "repeats": 3}, ["pick allreduce"]),
        ({"losses": lambda c, _, s: -1.0 - s if c.name == "ddp" else 1.0, "repeats": 3}, ["pick allreduce"]),
        ({"steps": 1}, ["No candidate was timed", "no run reached a second window"]),
        (
            {"ranks": 20, "repeats": 1, "events": True},
            ["Results per rank", "Of more than eight ranks, eight are drawn."],
        ),
        ({"candidates": CLASSIC[:1], "events": True}, ["Where the time goes", "is computing"]),
        ({"steps": 1, "events": True}, ["No candidate was timed", "Typical steps, rank by rank"]),
    ],
    ids=[
        "one",
        "no test",
        "no bound",
        "failed",
        "nothing yet",
        "many",
        "diverged",
        "spike",
        "negative",
        "1 step",
        "ranks",
        "one process",
        "1 step with events",
    ],
)
def test_little_or_odd_data(tmp_path: Path, case: dict[str, Any], said: list[str]) -> None:
    comparison = comparison_of(tmp_path, **case)
    page = Reader(render(comparison))
    seen = " ".join(page.text.split())
    assert all(words in seen for words in said), seen[:2000]
    assert "nan" not in re.split(r"\W+", page.text.lower())
    json.loads(page.data)


def test_of_two_repeats_the_page_shows_both_values(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, repeats=2)
    seen = " ".join(Reader(render(comparison)).text.split())
    assert "Small print: both repeats" in seen
    assert "10.00, 10.10" in seen
    assert comparison.row("single").step_s == Estimate(pytest.approx(0.01005, rel=1e-3), None, None, 2, (0.01, 0.0101))


def test_a_loss_curve_names_the_step_of_divergence(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        return math.nan if candidate.name == "ddp" and step > 4 else falling(candidate, repeat, step)

    page = Reader(render(comparison_of(tmp_path, losses=losses)))
    assert "(diverged at step 5)" in page.data


def test_without_a_time_per_step_there_are_no_shares_of_it(tmp_path: Path) -> None:
    shown = Reader(render(comparison_of(tmp_path, steps=4, events=True))).text  # Only the first window, of four steps.
    assert "Where the time goes" not in shown
    assert "What would help" not in shown


@pytest.mark.parametrize(("steps", "said"), [(5, True), (6, False)])
def test_a_page_says_where_the_warm_up_counts(tmp_path: Path, steps: int, said: bool) -> None:
    shown = " ".join(Reader(render(comparison_of(tmp_path, steps=steps, events=True))).text.split())
    assert "Where the time goes" in shown
    assert (shown.count("warm-up steps included: fewer than 6 steps") == 2) == said


def test_headings_distinguish_means_from_medians(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, events=True)
    assert page_columns(CANDIDATE_FIGURES, comparison.rows)[0].heading == "Median time per step"
    assert page_columns(SPLIT_FIGURES, split_rows(comparison))[0].heading == "Mean step"
    headings = [
        column.heading for column in page_columns(RANK_FIGURES, [rank for row in comparison.rows for rank in row.ranks])
    ]
    assert "Mean step" in headings
    assert len(set(headings)) == len(headings), "headings are distinct"


def test_the_main_table_and_that_of_splits_show_the_same_shares(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=3, events=True)
    for file in path.rglob("repeat-1/*/summary.json"):  # One of the three repeats differs.
        summary = json.loads(file.read_text())
        own = {"step_s": 1.0, "compute_s": 0.1, "overlapped_s": 0.0, "exposed_s": 0.8, "other_s": 0.1, "data_s": 0.0}
        for rank in summary["ranks"]:
            rank["split"] = own | {"descheduled_s": 0.0}
        file.write_text(json.dumps(summary))
    comparison = read_comparison(path)
    shares = {column.key: column.cells for column in page_columns(CANDIDATE_FIGURES, comparison.rows)}
    parts = {column.key: column.cells for column in page_columns(SPLIT_FIGURES, split_rows(comparison))}
    for number, row in enumerate(comparison.rows):
        if row.candidate.role == "candidate":
            assert f"{shares['exposed'][number].text}%" == parts["exposed_s"][number].interval
            assert f"{shares['compute'][number].text}%" == parts["compute_s"][number].interval


def test_without_tests_there_are_no_test_columns(tmp_path: Path) -> None:
    columns = page_columns(CANDIDATE_FIGURES, comparison_of(tmp_path, accuracy=None).rows)
    assert {"test_loss", "test_accuracy"}.isdisjoint(column.key for column in columns)


def test_colours_are_unique_stable_and_visible_on_light_and_dark() -> None:
    crowd = [*CLASSIC, *many(30), *[Candidate(f"none lr={n}", "none", role="bound") for n in range(4)]]
    given = colours(crowd)
    assert len(set(given.values())) == len(crowd)
    assert all(contrast(colour, ground) >= 3 for colour in given.values() for ground in ("#ffffff", "#16181c"))
    assert colours(list(CLASSIC))["ddp"] == colours(list(reversed(CLASSIC)))["ddp"] == given["ddp"]


def test_figures_show_the_comparisons_values(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, repeats=3)
    drawn = all_plots(comparison)
    assert list(drawn) == ["bars", "losses", "times", "loss_differences"]
    tints = colours(comparison.record_set.candidates)
    keys = ("step_s", "train_loss", "test_loss", "test_accuracy")
    for key, bars in zip(keys, drawn["bars"]["data"][::2], strict=True):
        estimates = [getattr(row, key) for row in comparison.rows]
        assert bars["x"] == [estimate.value for estimate in estimates]
        ends = zip(bars["x"], bars["error_x"]["array"], bars["error_x"]["arrayminus"], strict=True)
        for estimate, (value, more, less) in zip(estimates, ends, strict=True):
            assert (value + more, value - less) == (pytest.approx(estimate.high), pytest.approx(estimate.low))
    for trace, name, repeat in zip(*(drawn["losses"][key] for key in ("data", "candidates", "repeats")), strict=True):
        candidate = comparison.row(name).candidate
        assert trace["y"] == pytest.approx([falling(candidate, repeat, step) for step in range(12)], rel=1e-4)
        assert trace["line"]["color"] == tints[name]
    wall = drawn["losses"]["axes"][2]["x"][-1]
    assert wall[-1] == pytest.approx(12 * 0.01, rel=0.03)
    assert [axis["label"] for axis in drawn["losses"]["axes"]] == ["Step", "Epoch", "Wall time"]
    assert drawn["losses"]["axes"][1]["x"][0] == pytest.approx([step / 5 for step in range(12)])
    first = next(trace for trace in drawn["times"]["data"] if trace["mode"] == "markers")
    assert first["y"][0] == pytest.approx(10 * drawn["times"]["data"][0]["y"][1], rel=1e-3), "the first step, marked"
    assert drawn["loss_differences"]["candidates"] == ["single"]


def test_coinciding_curves_are_striped_and_others_are_not(tmp_path: Path) -> None:
    losses = all_plots(comparison_of(tmp_path))["losses"]
    first = [index for index, repeat in enumerate(losses["repeats"]) if repeat == 0]
    dashes = {losses["candidates"][index]: losses["axes"][0]["dashes"][index] for index in first}
    assert dashes["none"] == "dot"
    assert sorted(dashes[name] for name in ("single", "allreduce", "ddp")) == [
        "0px,0px,10px,20px",
        "0px,10px,10px,10px",
        "0px,20px,10px,0px",
    ]
    assert {losses["axes"][2]["dashes"][index] for index in first} == {"solid", "dash", "dot"}, "wall times differ"


def test_an_outlier_is_cut_off_and_labelled(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, losses=lambda c, r, s: 1e4 if c.name == "none" else falling(c, r, s))
    bars, labels = all_plots(comparison)["bars"]["data"][2:4]
    place = [row.candidate.name for row in comparison.rows].index("none")
    assert bars["x"][place] < 10
    assert "10,000" in labels["text"][place]
    assert "bar cut" in labels["text"][place]


def test_short_names_still_differ() -> None:
    names = [candidate.name for candidate in many(12)] + [
        "single",
        "x" * 60 + "1" + "y" * 60,
        "x" * 60 + "2" + "y" * 60,
    ]
    for most in (16, 26):
        short = short_names(names, most)
        assert len(set(short.values())) == len(names)
        assert all(len(label) <= most for label in short.values())
    assert short_names(["ddp", "p2p"]) == {"ddp": "ddp", "p2p": "p2p"}


@pytest.mark.parametrize(
    ("most", "label"),
    [
        (34, "parameter_server:asynchronous=true"),
        (30, "parameter_server:asynchronous"),
        (18, "para…:asynchronous"),
        (12, "parame…onous"),
    ],
)
def test_a_short_label_keeps_the_options_of_a_strategy(most: int, label: str) -> None:
    names = ["parameter_server", "parameter_server:asynchronous=true"]
    assert short_names(names, most)[names[1]] == label


def test_relative_differences() -> None:
    assert relative_difference(2.0, 1.0) == 0.5
    assert relative_difference(math.nan, math.nan) == 0
    assert relative_difference(1.0, math.nan) == math.inf


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_library_is_reported_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    from paceline.report.page import document

    document._plotly_js.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PacelineError, match=f"needs {package}") as caught:
        write_page(comparison_of(tmp_path), tmp_path / "report.html")
    assert f"pip install {package}" in str(caught.value.hint)
    assert "paceline report" in str(caught.value.hint)
    assert not (tmp_path / "report.html").exists()


def test_the_page_is_written_atomically(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path)
    write_page(comparison, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render(comparison)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]
    with pytest.raises(PacelineError, match="cannot write"):
        write_page(comparison, tmp_path / "missing" / "report.html")


def test_ranks_that_share_cores_are_noted_on_the_page_and_in_json(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e")
    for file in path.rglob("run.json"):
        content = json.loads(file.read_text())
        content["topology"]["cores"] = 1.0
        file.write_text(json.dumps(content))
    comparison = read_comparison(path)
    assert re.search(r"ranks share 1 core\b", " ".join(to_json(comparison)["warnings"]))
    assert re.search(r"ranks share 1 core\b", render(comparison))


def test_parts_of_long_names_stay_together_on_the_page() -> None:
    name = "parameter_server:mode=asynchronous,max_staleness=4"
    parts = re.findall(r'<span class="part-of-name">(.*?)</span>', str(breakable(f"Pick {name} now, 1,234 times")))
    assert [part.replace("<wbr>", "") for part in parts] == [
        "parameter_server:",
        "mode=",
        "asynchronous,",
        "max_staleness=",
        "4",
    ]
    assert str(breakable("Pick <b> now")) == "Pick &lt;b&gt; now"
    assert longest_part(f"Pick {name}") == len("parameter_server:")
