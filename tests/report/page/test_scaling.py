"""Tests of the page of a scaling experiment: complete, safely escaped, and readable with little data."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from examinations import examination
from paceline.analysis.scaling.curves import Scaling
from paceline.records.examination import write_examination
from paceline.records.experiment.design import Candidate
from paceline.report.figures.columns import page_columns
from paceline.report.figures.points import PART_FIGURES, POINT_FIGURES
from paceline.report.page.scaling import render_scaling
from report.page.test_comparison import Reader
from scaling_on_disk import ONE_HOST, even, read_scaling, write_scaling

NASTY = "</script><script>alert(1)</script>&\u2028%{y}"


def figure(page: Reader, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.data)["figures"][name]
    return found


def panel(page: Reader, name: str, view: int, number: int) -> list[dict[str, Any]]:
    """Return the traces of one panel of a plot."""
    found = figure(page, name)
    traces: list[dict[str, Any]] = found["sets"][found["views"][view]["sets"][number][0]]
    return traces


def labels(traces: list[dict[str, Any]]) -> dict[str, float]:
    """Return the labels of curves, and their heights."""
    return {trace["text"][1].strip(): trace["y"][1] for trace in traces if trace["mode"] == "lines+text"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Scaling:
    path = write_scaling(
        tmp_path_factory.mktemp("scaling") / "e",
        ["single", "ddp", "allreduce", "p2p", "gather_scatter"],
        repeats=3,
        events=True,
    )
    write_examination(path, examination())
    return read_scaling(path)


@pytest.fixture(scope="module")
def page(found: Scaling) -> Reader:
    return Reader(render_scaling(found))


def test_the_page_says_which_scaling_it_is_and_against_what(page: Reader) -> None:
    seen = " ".join(page.text.split())
    for words in (
        "ddp on 4 ranks is 2.72× (2.72–2.72) as fast as one process",
        "Strong scaling: the global batch stays at 256",
        "Weak scaling: every rank gets 64 samples, so the global batch grows with the ranks, from 64 to 256.",
        "strong and weak scaling",
        "1, 2 and 4 ranks",
        "up to 4 emulated hosts of 0.5 cores each (4@200mbit)",
        "The learning rate is the same at every batch size",
        "E = T₁/(N·T_N)",
        "The machine and the link",
    ):
        assert words in seen, words


def test_every_tooltip_has_a_definition(page: Reader) -> None:
    wanted = {value for name, value in page.attributes if name == "aria-describedby"}
    existing = {value for name, value in page.attributes if name == "id"}
    assert wanted
    assert wanted <= existing


def test_curves_have_labels_and_an_ideal_line(page: Reader) -> None:
    time, speed, share = (panel(page, "strong-curves", 0, number) for number in range(3))
    names = {"ddp", "allreduce", "p2p", "gather_scatter"}
    assert set(labels(time)) == names | {"single"}
    assert set(labels(speed)) == set(labels(share)) == names | {"ideal"}
    (ideal, *_) = speed
    assert (ideal["line"]["dash"], ideal["x"], ideal["y"]) == ("dash", [1, 2, 4], [1, 2, 4])
    views = [view["label"] for view in figure(page, "strong-curves")["views"]]
    assert views == ["Relative to single", "Relative to itself on 1 rank"]


@pytest.mark.parametrize("name", ["strong-curves", "weak-curves"])
def test_labels_do_not_overlap_and_stay_inside(page: Reader, name: str) -> None:
    view = figure(page, name)["views"][0]
    for number, axis in enumerate(("yaxis", "yaxis2", "yaxis3")):
        low, high = view["layout"][axis]["range"]
        heights = sorted(labels(panel(page, name, 0, number)).values())
        gaps = [(upper - lower) / (high - low) for lower, upper in itertools.pairwise(heights)]
        assert min(gaps) > 0.055, "14 of 250 pixels"
        assert low <= heights[0]
        assert heights[-1] <= high


def test_crowded_points_are_hollow_and_have_no_speed_up(tmp_path: Path) -> None:
    shapes = [(1, 1), (1, 2), (1, 4)]
    path = write_scaling(
        tmp_path / "e", shapes=shapes, design=ONE_HOST, cores=2.0, modes=["strong"], threads={"single": 2}
    )
    page = Reader(render_scaling(read_scaling(path)))
    time, speed, _ = (panel(page, "strong-curves", 0, number) for number in range(3))
    (ddp, *_) = [trace for trace in time if trace["mode"] == "lines+markers"]
    assert ddp["marker"]["symbol"] == ["circle", "circle", "circle-open"]
    places = [trace["x"] for trace in speed if trace["mode"] == "lines+markers"]
    assert [[round(place) for place in own] for own in places] == [[1, 2], [1, 2]]
    assert places[1][0] - places[0][0] > 0.05, "intervals of two strategies are beside each other"
    assert "4 ranks share 2 cores" in page.text
    views = figure(page, "strong-curves")["views"]
    assert views[0]["label"] == "Relative to itself on 1 rank", "no efficiency is claimed relative to single"
    assert any("single had 2 cores" in note["text"] for note in views[1]["layout"]["annotations"])


def test_several_ranks_on_a_host_have_separate_curves(tmp_path: Path) -> None:
    shapes = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
    page = Reader(render_scaling(read_scaling(write_scaling(tmp_path / "e", shapes=shapes, modes=["strong"]))))
    assert {"ddp, 1/host", "ddp, 2/host", "single"} <= set(labels(panel(page, "strong-curves", 0, 0)))
    assert "4 ranks over 2 hosts instead of 4" in page.text


def test_bars_have_a_part_for_everything(page: Reader) -> None:
    bars = figure(page, "strong-split")
    assert [trace["meta"] for trace in bars["data"] if trace["type"] == "bar"] == [
        "compute",
        "overlapped communication",
        "exposed communication",
        "other",
    ]
    shown = [text.strip() for text in bars["layout"]["yaxis"]["ticktext"]]
    assert shown[:4] == ["single  1 rank", "ddp  1 rank", "2 ranks", "4 ranks"]


def test_every_figure_of_a_point_has_its_interval(found: Scaling) -> None:
    points = found.points("strong")
    columns = {column.key: column for column in page_columns((*POINT_FIGURES, *PART_FIGURES), points)}
    for figure in (*POINT_FIGURES, *PART_FIGURES):
        if figure.is_estimate and figure.page and figure.number(points[-1]) is not None:
            assert columns[figure.key].cells[-1].interval, figure.key


def test_intervals_too_wide_to_be_useful_are_replaced(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        return even(candidate, repeat) * (9 if repeat and candidate.strategy == "ddp" else 1)

    points = read_scaling(write_scaling(tmp_path / "e", step_s=step_s, repeats=3)).points("strong")
    assert points[3].strategy == "ddp"
    columns = {column.key: column.cells[3].interval for column in page_columns(POINT_FIGURES, points)}
    for key in ("step_s", "epoch_s", "speed_up_over_single", "efficiency_over_single"):
        assert columns[key] == "too wide (n = 3)", key
    assert columns["speed_up_over_one_rank"] == "2.72–2.72", "paired"


def test_bytes_of_the_most_ranks_are_shown(page: Reader) -> None:
    seen = " ".join(page.text.split())
    assert "Bytes on 4 ranks over 4 hosts" in seen
    assert seen.count("exactly the plan plus framing") == 4
    assert seen.count("from \\ to") == 4


def test_text_from_users_is_escaped(tmp_path: Path) -> None:
    about = {"host": NASTY, "command": f"paceline scale {NASTY}"}
    failures = {"ddp on 4 of 4, batch 256": NASTY}
    strategies = ["single", "ddp", NASTY]
    path = write_scaling(tmp_path / "e", strategies, failures=failures, provenance=about, modes=["strong"])
    page = Reader(render_scaling(read_scaling(path)))
    assert page.tags.count("script") == 3
    assert page.text.count(NASTY) > 4
    assert not re.search("[<>&\u2028\u2029]", page.data)
    policy = next(value for name, value in page.attributes if value and value.startswith("default-src"))
    assert "'unsafe-inline'; img-src" in policy
    assert policy.count("sha256-") == 2


@pytest.mark.parametrize("repeats", [0, 1])
def test_little_is_enough_for_a_page(tmp_path: Path, repeats: int) -> None:
    page = Reader(render_scaling(read_scaling(write_scaling(tmp_path / "e", repeats=repeats, interrupted=True))))
    assert "interrupted" in page.text
    assert "nan" not in re.split(r"\W+", page.text.lower())
    assert page.text.count("no difference here is certain") == repeats


def test_of_two_repeats_the_page_shows_both_values(tmp_path: Path) -> None:
    found = read_scaling(write_scaling(tmp_path / "e", repeats=2))
    seen = " ".join(Reader(render_scaling(found)).text.split())
    assert "Small print: both repeats, which are too few for an" in seen
    assert "95% interval over repeats" not in seen
    (column, *_) = page_columns(POINT_FIGURES, found.points("strong"))
    values = [point.row.step_s.each for point in found.points("strong") if point.row.step_s]
    assert all(len(each) == 2 for each in values)
    assert column.cells[0].interval in seen
