"""Traces: that Perfetto and Chrome can nest what is in them, that ranks are on one clock, and that they stay small."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import CLASSIC, read_comparison, write_experiment
from paceline.errors import RecordError
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.schema import MarkRow, ResourceRow
from paceline.records.timeline import NOT_MEASURED, Purpose, RowKind, TimelineWriter
from paceline.records.writer import MarkWriter, ResourceWriter
from paceline.report.trace import where_traces_are, write_trace, write_traces

STEPS = 12


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    """A run of `ddp` on two ranks, in which an epoch ends and the garbage is collected twice, once in evaluation."""
    write_experiment(tmp_path / "e", CLASSIC[3:], repeats=1, steps=STEPS, events=True)
    folder = RunFolder(tmp_path / "e" / "repeat-1" / "1")
    marks = MarkWriter(folder, 0)
    marks.write([MarkRow("epoch", 0.05, 0.05, "0"), MarkRow("gc", 0.051, 0.053, "generation 2")])
    marks.write([MarkRow("evaluation", 0.2, 0.3, ""), MarkRow("gc", 0.29, 0.31, 'a "quoted" word')])
    marks.close()
    samples = ResourceWriter(folder, 1)
    samples.write([ResourceRow(t / 10, t / 20, 10**8 + t, 3, 0.0, None, None, None, None, None) for t in range(4)])
    samples.close()
    return read_run(folder.path)


def traced(run: RunRecord) -> list[dict[str, Any]]:
    """The events of a run's trace, read from its file."""
    write_trace(run, run.path / "trace.json")
    content = json.loads((run.path / "trace.json").read_text())
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def threads(events: Iterable[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The slices of every thread of every process, by their names."""
    events = list(events)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return found


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """When a slice starts and ends, as Perfetto reads it: it multiplies by a thousand and cuts the rest off."""
    start = int(event["ts"] * 1000)
    return start, start + int(event["dur"] * 1000)


def assert_nested(slices: Iterable[dict[str, Any]]) -> None:
    """Of two slices of a thread, one contains the other, or they do not overlap."""
    open_ends: list[int] = []
    for start, end in sorted(map(nanoseconds, slices), key=lambda one: (one[0], -one[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def test_a_process_per_rank_with_what_it_computed_and_sent(run: RunRecord) -> None:
    events = traced(run)
    by_thread = threads(events)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    for rank in (0, 1):
        names = [event["name"] for event in by_thread[rank, "compute"]]
        assert names.count("step 5") == 1
        assert [names.count(what) for what in ("data", "forward", "backward", "waiting", "optimiser")] == [STEPS] * 5
        assert [event["args"] for event in by_thread[rank, "wire"]] == [
            {"step": step, "bytes": 4000, "carries": "gradients"} for step in range(STEPS)
        ]
    assert not [event for event in events if event["ph"] in "BEbe"], "complete events cannot be left open"
    for slices in by_thread.values():
        assert_nested(slices)


def test_slices_are_as_long_as_what_they_show_and_on_one_clock(run: RunRecord) -> None:
    by_thread = threads(traced(run))
    length_s = 0.01  # Of `write_experiment`'s first candidate; its first step takes ten times as long.
    for rank, late in ((0, 0.0), (1, 0.02)):
        waits = [event for event in by_thread[rank, "compute"] if event["name"] == "waiting"]
        sends = by_thread[rank, "wire"]
        assert waits[3]["ts"] / 1e6 == pytest.approx((10 + 2 + 0.72 + late) * length_s, abs=2e-7)
        assert waits[3]["dur"] / 1e6 == pytest.approx((0.2 - late) * length_s, abs=2e-7)
        assert sends[3]["ts"] / 1e6 == pytest.approx((10 + 2 + 0.62 + late) * length_s, abs=2e-7)
        assert sends[3]["dur"] / 1e6 == pytest.approx((0.3 - late) * length_s, abs=2e-7)


def test_arrows_join_the_same_operation_on_all_ranks(run: RunRecord) -> None:
    by_thread = threads(traced(run))
    first, second = by_thread[0, "wire"], by_thread[1, "wire"]
    assert [event["bind_id"] for event in first] == [event["bind_id"] for event in second]
    assert len({event["bind_id"] for event in first}) == STEPS
    assert all(event["flow_out"] for event in first), "arrows start where they came first"
    assert all(event["flow_in"] for event in second)


def test_marks_and_counters(run: RunRecord) -> None:
    events = traced(run)
    by_thread = threads(events)
    assert [event["args"]["what"] for event in events if event["ph"] == "i"] == ["0"]
    assert [event["name"] for event in by_thread[0, "beside the steps"]] == ["gc", "evaluation"]
    assert by_thread[0, "beside the steps 2"][0]["args"] == {"what": 'a "quoted" word'}, "two that only partly overlap"
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["pid"] for event in counters} == {1}
    assert [event["args"][""] for event in counters if event["name"] == "CPU, %"] == [50.0] * 3
    assert next(event["args"][""] for event in counters if event["name"] == "memory, MB") == 100.0


@pytest.mark.parametrize("seed", range(10))
def test_whatever_overlaps_on_the_wire_nests(tmp_path: Path, seed: int) -> None:
    write_experiment(tmp_path / "e", CLASSIC[3:], repeats=1, events=True)
    path = tmp_path / "e" / "repeat-1" / "1"
    draw = random.Random(seed)
    for rank in range(2):
        writer = TimelineWriter(path, rank)
        writer.write([(0, RowKind.STEP, Purpose.NOTHING, -1, 0, 0.0, 1.0, NOT_MEASURED, NOT_MEASURED)])
        for kind in draw.choices([RowKind.SEND, RowKind.RECV, RowKind.ALL_REDUCE], k=40):
            start, end = sorted((draw.random(), draw.random()))
            peer = -1 if kind is RowKind.ALL_REDUCE else 1 - rank
            waited = draw.choice([NOT_MEASURED, draw.uniform(start, end)])
            writer.write([(0, kind, Purpose.GRADIENTS, peer, draw.choice([8, 400]), start, end, waited, NOT_MEASURED)])
        writer.close()
    events = traced(read_run(path))
    by_thread = threads(events)
    for slices in by_thread.values():
        assert_nested(slices)
    wired = [event for (_, name), slices in by_thread.items() if name.startswith("wire") for event in slices]
    assert len(wired) == 80
    groups = defaultdict(list)
    for event in wired:
        if "bind_id" in event:
            groups[event["bind_id"]].append(event)
    for one, other in groups.values():
        assert {one["pid"], other["pid"]} == {0, 1}
        assert one["args"]["bytes"] == other["args"]["bytes"]
        assert {one["name"], other["name"]} in ({"send", "recv"}, {"all_reduce"})
        assert ("flow_out" in one) != ("flow_out" in other)


def test_a_step_takes_kilobytes(run: RunRecord) -> None:
    write_trace(run, run.path / "trace.json")
    size = (run.path / "trace.json").stat().st_size
    print(f"{size / STEPS:.0f} bytes per step of two ranks, with an operation each")
    assert size / STEPS < 2000
    per_operation = max(len(line) for line in (run.path / "trace.json").read_text().splitlines() if "bytes" in line)
    assert per_operation < 200


def test_every_run_of_an_experiment_and_what_has_none(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "e", repeats=2, events=True)
    runs = [entry.run for entry in read_comparison(experiment).record_set.runs]
    written = write_traces(runs)
    assert written == [run.path / "trace.json" for run in runs]
    assert all(json.loads(path.read_text())["traceEvents"] for path in written)
    assert not list(experiment.rglob(".trace.json*"))
    assert where_traces_are(written[:1]) == f"trace: {written[0]}, which ui.perfetto.dev opens"
    assert where_traces_are(written).startswith("traces: 8 files trace.json in the runs' folders under ")
    without = read_comparison(write_experiment(tmp_path / "f")).record_set.runs
    with pytest.raises(RecordError, match="no timelines"):
        write_traces(entry.run for entry in without)
