"""Tests of the page's sections on steps: bottlenecks, time split, timeline, traffic and machine."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from contrast import contrast
from examinations import examination
from experiments_on_disk import CLASSIC, read_comparison, write_experiment
from paceline.analysis.comparison import Comparison
from paceline.analysis.steps.activity import ACTIVITIES
from paceline.analysis.steps.split import PARTS
from paceline.records.examination import MeasuringCost, write_examination
from paceline.records.experiment.design import Candidate
from paceline.records.timeline import NOT_MEASURED, Purpose, RowKind, TimelineWriter
from paceline.report.explanations import PART, explain
from paceline.report.figures.candidates import CANDIDATE_FIGURES
from paceline.report.figures.columns import page_columns
from paceline.report.figures.steps import BYTES_FIGURES
from paceline.report.page.comparison import all_plots, render
from paceline.report.page.sections import SPLIT_PART
from paceline.report.plots.palette import OPERATIONS, PHASES
from paceline.report.plots.palette import PARTS as PART_COLOURS
from paceline.report.plots.split import split
from paceline.report.plots.timeline import MOST_BARS, timeline
from paceline.report.plots.timeline_steps import MOST_RANKS
from paceline.report.tables.steps import bytes_rows, operation_rows, rank_split_rows, split_rows
from paceline.report.terminal.comparison import to_json
from run_models import replicas

STEP_S = {"single": 0.08, "none": 0.01, "allreduce": 0.05, "ddp": 0.04}


def comparison_of(tmp_path: Path, *args: Any, **kwargs: Any) -> Comparison:
    kwargs = {"events": True, "step_s": STEP_S} | kwargs
    return read_comparison(write_experiment(tmp_path / "experiment", *args, **kwargs))


class Elements(HTMLParser):
    """Ids of a page with the text of their table cells, links inside the page, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: dict[str, str] = {}
        self.links: list[str] = []
        self.shown = ""
        self._cell: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids[str(values["id"])] = ""
            self._cell = str(values["id"]) if tag == "td" else None
        if tag == "a" and (values.get("href") or "").startswith("#"):
            self.links.append(str(values["href"])[1:])

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.ids[self._cell] += data
        self.shown += data


def test_every_reason_links_to_its_value(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path)
    page = Elements(render(comparison))
    reasons = explain(comparison)
    assert {reason.candidate for reason in reasons} == {"single", "none", "allreduce", "ddp"}
    for reason in reasons:
        assert reason.anchor in page.links
        assert "%" in page.ids[reason.anchor], reason.anchor
        amount, _, rest = reason.text.partition(")")
        assert amount in page.shown
        assert rest in page.shown
        assert reason.remedy in page.shown
    assert set(page.links) <= page.ids.keys(), "every link has a target"


def test_every_reason_has_a_bar_in_the_colour_of_its_part() -> None:
    assert {SPLIT_PART.get(part, part) for part in PART.values()} <= PART_COLOURS.keys()


def test_the_parts_of_a_step(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path)
    rows = {row.candidate: row for row in split_rows(comparison)}
    shares = {part: rows["ddp"].split.share(part) for part in PARTS}
    assert shares == {part: pytest.approx(share) for part, share in zip(PARTS, (0.69, 0.1, 0.19, 0.02), strict=True)}
    assert rows["ddp"].split.overlap == pytest.approx(0.1 / 0.29)
    assert rows["none"].split.overlap is None
    ranks = {row.rank: row for row in rank_split_rows(comparison) if row.candidate == "allreduce"}
    assert ranks[0].wait_s == pytest.approx(0.02 * STEP_S["allreduce"], rel=0.03)
    assert (ranks[0].waited_for, ranks[1].waited_for) == (0.0, 1.0)
    page = Elements(render(comparison))
    assert page.ids[f"split-{place_of(comparison, 'ddp')}-exposed"] == "7.6419%", "milliseconds, and the share"
    columns = {column.key: column for column in page_columns(CANDIDATE_FIGURES, comparison.rows)}
    assert columns["exposed"].cells[place_of(comparison, "ddp")].text == "19"
    assert columns["exposed"].cells[place_of(comparison, "none")].sort is None
    assert columns["step_s"].cells[place_of(comparison, "ddp")].parts == tuple(map(pytest.approx, shares.values()))


def place_of(comparison: Comparison, name: str) -> int:
    return [row.candidate.name for row in comparison.rows].index(name)


def test_without_events_the_share_above_the_bound_is_shown(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, events=False)
    keys = [column.key for column in page_columns(CANDIDATE_FIGURES, comparison.rows)]
    assert "above_bound" in keys
    assert "exposed" not in keys
    page = Elements(render(comparison))
    assert {"why", "split", "timeline", "network", "machine"}.isdisjoint(page.ids)
    assert set(page.links) <= page.ids.keys()


def test_the_figure_of_the_split_shows_strategies_and_ranks(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path)
    figure = split(comparison)
    assert figure is not None
    by_strategy, by_rank = figure["sets"]
    for part, trace in zip(PARTS, by_strategy, strict=False):
        means = [row.split.mean for row in comparison.rows if row.split is not None]
        assert trace["x"] == pytest.approx([1000 * getattr(mean, f"{part}_s") for mean in means], rel=1e-4)
        assert trace["marker"]["color"] == PART_COLOURS[part]
    assert [len(trace["x"]) for trace in by_rank[:4]] == [7] * 4, "two ranks of all but the baseline"
    totals = [sum(trace["x"][place] for trace in by_strategy[:4]) for place in range(4)]
    assert by_strategy[4]["x"] == pytest.approx(totals, rel=1e-3), "they add up"


def bars_of(traces: list[dict[str, Any]]) -> list[tuple[str, float, float, float]]:
    """Return kind, place, start and end in milliseconds of every bar."""
    return [
        (trace["meta"], y, base, base + x)
        for trace in traces
        for y, base, x in zip(trace["y"], trace["base"], trace["x"], strict=True)
    ]


def test_the_timeline_shows_the_median_and_the_slowest_step_of_each(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path)
    slow = tmp_path / "experiment" / "repeat-1" / "4"
    for rank in range(2):  # Step 12 of ddp, in which only communication is slow.
        with (slow / f"timeline-{rank}.bin").open("ab") as file:
            extra = TimelineWriter(tmp_path, rank)
            extra.write([(12, RowKind.STEP, Purpose.NOTHING, -1, 0, 1.0, 1.5, NOT_MEASURED, NOT_MEASURED)])
            extra.write(
                [(12, RowKind.ALL_REDUCE, Purpose.GRADIENTS, -1, 4000, 1.1 + rank / 100, 1.4, 1.1, NOT_MEASURED)]
            )
            extra.close()
            file.write((tmp_path / f"timeline-{rank}.bin").read_bytes()[18:])
    figure = timeline(read_comparison(tmp_path / "experiment"))
    assert figure is not None
    views = {(view["group"], view["label"]): view["sets"] for view in figure["views"]}
    names = [row.candidate.name for row in comparison.rows]
    assert list(dict.fromkeys(group for group, _ in views)) == ["All", *names]
    (number,) = [number for number, _ in views["ddp", "median step"]]
    assert len(views["All", "median steps"]) == len(names)
    assert number in [shown for shown, _ in views["All", "median steps"]]
    assert views["ddp", "slowest step"] == [[number + 1, "y"]]
    step_ms = 1000 * STEP_S["ddp"]
    median = bars_of(figure["sets"][number])
    wire = [bar for bar in median if bar[0] == "all_reduce of gradients"]
    assert [(bar[2], bar[3]) for bar in wire] == [
        (pytest.approx(start * step_ms, abs=0.01), pytest.approx(0.92 * step_ms, abs=0.01)) for start in (0.62, 0.64)
    ]
    waits = [bar for bar in median if bar[0] == "waiting for communication"]
    assert [bar[2] for bar in waits] == [pytest.approx(start * step_ms, abs=0.01) for start in (0.72, 0.74)]
    assert [round(bar[1]) for bar in waits] == [0, 1], "a row per rank"
    slowest = bars_of(figure["sets"][number + 1])
    assert ("all_reduce of gradients", 0.21, 100.0, 400.0) in slowest
    assert {key["label"] for key in figure["keys"]} == {*ACTIVITIES, "all_reduce"}


def test_overlapping_operations_are_stacked(tmp_path: Path) -> None:
    comparison_of(tmp_path, CLASSIC[3:], repeats=1)
    writer = TimelineWriter(tmp_path / "experiment" / "repeat-1" / "1", 0)
    writer.write([(5, RowKind.STEP, Purpose.NOTHING, -1, 0, 0.0, 1.0, NOT_MEASURED, NOT_MEASURED)])
    for start, end in ((0.1, 0.5), (0.2, 0.4), (0.6, 0.8)):
        writer.write([(5, RowKind.BROADCAST, Purpose.BUFFERS, 0, 4000, start, end, NOT_MEASURED, NOT_MEASURED)])
    writer.close()
    figure = timeline(read_comparison(tmp_path / "experiment"))
    assert figure is not None
    wire = next(trace for trace in figure["sets"][0] if trace["meta"] == "broadcast of buffers")
    first, second, third = wire["y"][:3]
    assert first == third < second
    assert wire["width"] == pytest.approx(second - first, abs=0.002), "they touch, and do not overlap"
    assert wire["customdata"][0][:2] == ["rank 0", ", 4.00 kB, root: rank 0"]


def test_many_ranks_and_operations_stay_small(tmp_path: Path) -> None:
    comparison_of(tmp_path, [Candidate(f"{n}", "p2p") for n in range(3)], ranks=10, repeats=1)
    rows = [(5, RowKind.STEP, Purpose.NOTHING, -1, 0, 0.0, 1.0, NOT_MEASURED, NOT_MEASURED)]
    rows += [
        (5, RowKind.SEND, Purpose.GRADIENTS, 1, 4, n / 3000, (n + 0.5) / 3000, NOT_MEASURED, NOT_MEASURED)
        for n in range(3000)
    ]
    for file in (tmp_path / "experiment").rglob("timeline-*.bin"):
        writer = TimelineWriter(file.parent, int(file.stem.removeprefix("timeline-")))
        writer.write(rows)
        writer.close()
    figure = timeline(read_comparison(tmp_path / "experiment"))
    assert figure is not None
    assert len(json.dumps(figure)) < 400_000
    assert [view["label"] for view in figure["views"]] == ["median steps", *["median step"] * 3], (
        "there is only one step"
    )
    sends = next(trace for trace in figure["sets"][0] if trace["meta"] == "send of gradients")
    assert len({round(y) for y in sends["y"]}) == MOST_RANKS
    assert sum(len(trace["x"]) for traces in figure["sets"] for trace in traces) <= MOST_BARS
    assert sum(int(about[1].split(" ×")[0].strip(", ")) for about in sends["customdata"]) == 3000 * MOST_RANKS


def test_bytes_and_bandwidth(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path)
    assert {row.candidate: (row.gradients, row.total, row.over_bound) for row in bytes_rows(comparison)} == {
        "allreduce": (4000, 4000, 1.0),
        "ddp": (4000, 4000, 1.0),
    }
    assert all(row.utilisation is None for row in operation_rows(comparison))
    write_examination(tmp_path / "experiment", examination())
    examined = read_comparison(tmp_path / "experiment")
    assert examined.examination is not None
    assert examined.examination.link is not None
    for row in operation_rows(examined):
        assert row.traffic.busbw is not None
        assert row.utilisation == pytest.approx(row.traffic.busbw / examined.examination.link.bytes_per_s)
    page = Elements(render(examined))
    assert "Ranks send gradients, and nothing else." in page.shown
    assert {"network", "machine"} <= page.ids.keys()
    assert "Utilisation" in page.shown
    drawn = all_plots(examined)["link"]
    assert drawn["layout"]["showlegend"]
    labels = {note["text"] for note in drawn["layout"]["annotations"]}
    assert labels.isdisjoint(trace["name"] for trace in drawn["data"]), "labels must not cover curves"


def test_control_messages_are_shown_where_they_are_sent(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, [Candidate("ddp", "ddp")], repeats=1)
    assert "control" not in {column.key for column in page_columns(BYTES_FIGURES, bytes_rows(comparison))}
    for file in (tmp_path / "experiment").rglob("timeline-*.bin"):
        writer = TimelineWriter(file.parent, int(file.stem.removeprefix("timeline-")))
        writer.write([(5, RowKind.STEP, Purpose.NOTHING, -1, 0, 0.0, 1.0, NOT_MEASURED, NOT_MEASURED)])
        for purpose, size in ((Purpose.GRADIENTS, 4000), (Purpose.CONTROL, 8)):
            writer.write([(5, RowKind.ALL_REDUCE, purpose, -1, size, 0.1, 0.5, NOT_MEASURED, NOT_MEASURED)])
        writer.close()
    comparison = read_comparison(tmp_path / "experiment")
    rows = bytes_rows(comparison)
    assert [(row.gradients, row.control, row.total) for row in rows] == [(4000, 8, 4008)]
    assert {column.key: column.heading for column in page_columns(BYTES_FIGURES, rows)}["control"] == "Control"
    assert "Ranks send gradients and control messages, and nothing else." in Elements(render(comparison)).shown


def test_the_cost_of_measuring_is_shown(tmp_path: Path) -> None:
    write_experiment(tmp_path / "experiment")
    cost = {"workload": "cnn on digits", "strategy": "ddp", "share": 0.012, "low": -0.004, "high": 0.0281}
    found = MeasuringCost(**cost, pairs=20, steps=4, step_cpu_s=0.0182)  # type: ignore[arg-type]
    write_examination(tmp_path / "experiment", examination(measuring_cost=found))
    page = Elements(render(read_comparison(tmp_path / "experiment")))
    share = "1.2% of the CPU time of a step (95% interval −0.4% to 2.8%)"
    assert f"Collecting events has no measurable cost: {share}, measured" in page.shown
    assert "measured on cnn on digits under ddp: 18.20 ms per step without events." in page.shown
    write_examination(tmp_path / "experiment", examination(measuring_cost=replace(found, low=0.004)))
    page = Elements(render(read_comparison(tmp_path / "experiment")))
    assert "Collecting events costs 1.2% of the CPU time of a step (95% interval 0.4% to 2.8%), measured" in page.shown


def test_the_cost_of_comparing_replicas_is_shown(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "experiment")
    write_examination(path, examination())
    file = path / "repeat-1" / "3" / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"replicas": to_builtins(replicas())}))
    comparison = read_comparison(path)
    sentence = "Comparing the replicas took at most 0.04% of the training time; no step time contains it."
    assert sentence in Elements(render(comparison)).shown
    assert to_json(comparison)["comparing_replicas_share"] == pytest.approx(0.0004)


def test_colours_of_parts_have_enough_contrast() -> None:
    every = {**PART_COLOURS, **PHASES, **OPERATIONS}
    assert all(contrast(colour, ground) >= 3 for colour in every.values() for ground in ("#ffffff", "#16181c"))
    assert all(contrast(colour, "#ffffff") >= 4.5 for colour in PART_COLOURS.values()), "shares are written on the bars"
    assert set(PHASES) == set(ACTIVITIES)
    assert set(OPERATIONS) == {kind.title for kind in RowKind if kind.is_operation}
    assert set(PHASES.values()).isdisjoint(OPERATIONS.values())
