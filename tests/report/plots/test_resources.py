"""Tests of the plot of CPU and memory, from samples with known results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import read_comparison, write_experiment
from paceline.records import RunFolder
from paceline.records.experiment.design import Candidate
from paceline.records.schema import MarkRow, ResourceRow
from paceline.records.writer import MarkWriter, ResourceWriter
from paceline.report.figures.columns import page_columns
from paceline.report.figures.machine import HOST_FIGURES
from paceline.report.figures.ranks import RANK_FIGURES
from paceline.report.page.comparison import render
from paceline.report.plots.resources import MOST_COLLECTIONS, resources
from paceline.report.tables.resources import host_rows

NAMES = ("allreduce", "<b>ddp</b>")


def sample(folder: RunFolder, rank: int, collections: int, *, first: bool = False, **device: int) -> None:
    """Write samples of ten seconds: first half a core, then one and a half; an evaluation at the end."""
    writer = ResourceWriter(folder, rank)
    host = {"host_busy": 0.5, "host_used_bytes": 1, "host_available_bytes": 1} if rank == 0 or first else {}
    base = ResourceRow(0, 0, 100_000_000, 4, 0, None, None, None, None, None)
    for time_s, cpu_s in ((0, 7), (5, 9.5), (5.001, 9.5), (10, 17)):
        writer.write([base._replace(time_s=time_s, cpu_s=cpu_s, **host, **device)])
    writer.close()
    marks = MarkWriter(folder, rank)
    marks.write([MarkRow("epoch", t, t, str(n)) for n, t in enumerate((3, 6, 9))])
    marks.write([MarkRow("gc", n / 1000, n / 1000 + (0.02 if n == 7 else 0.001), "") for n in range(collections)])
    marks.write([MarkRow("evaluation", 9, 10, "")])
    marks.close()


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write_experiment(
        tmp_path_factory.mktemp("experiment"), [Candidate(name, "ddp") for name in NAMES], repeats=2
    )
    for repeat, number, collections in ((1, 1, 0), (1, 2, 60)):  # The second repeat is not drawn.
        for rank in (0, 1):
            sample(RunFolder(path / f"repeat-{repeat}" / str(number)), rank, collections)
    found = resources(read_comparison(path))
    assert found is not None
    return found


def of_axis(figure: dict[str, Any], y: str, mode: str = "lines") -> list[dict[str, Any]]:
    return [trace for trace in figure["data"] if trace["yaxis"] == y and trace["mode"] == mode]


def test_a_candidate_has_two_panels_with_a_line_per_rank(figure: dict[str, Any]) -> None:
    assert [len(of_axis(figure, y)) for y in ("y", "y2", "y3", "y4")] == [2, 2, 2, 2]
    assert [trace["meta"] for trace in of_axis(figure, "y")] == ["rank 0", "rank 1"]


def test_cpu_is_in_per_cent_of_a_core_and_constant_between_samples(figure: dict[str, Any]) -> None:
    cpu = of_axis(figure, "y")[0]
    assert cpu["x"] == [0, 5, 10]
    assert cpu["y"] == [50, 50, 150]
    assert cpu["line"]["shape"] == "vh"
    assert figure["layout"]["yaxis"]["range"] == pytest.approx([0, 162])


def test_memory_is_in_the_unit_of_the_axis(figure: dict[str, Any]) -> None:
    assert set(of_axis(figure, "y2")[0]["y"]) == {100}
    assert figure["layout"]["yaxis2"]["title"]["text"] == "memory, MB"


def test_events_are_marked(figure: dict[str, Any]) -> None:
    texts = [text for trace in of_axis(figure, "y", "markers") for text in trace["customdata"]]
    assert texts == ["evaluation, 1.00 s", "end of epoch 1", "end of epoch 2"]
    collected = [t for t in of_axis(figure, "y3", "markers") if t["marker"]["symbol"] == "triangle-up"]
    assert [len(trace["x"]) for trace in collected] == [MOST_COLLECTIONS]
    assert {text for text in collected[0]["customdata"][:2]} == {
        "garbage collection of rank 0, 20.00 ms",
        "garbage collection of rank 1, 20.00 ms",
    }
    shapes = [(s["type"], s["xref"], s["x0"], s["x1"]) for s in figure["layout"]["shapes"]]
    for x in ("x", "x2", "x3", "x4"):
        assert ("rect", x, 9, 10) in shapes
        assert [s[2] for s in shapes if s[:2] == ("line", x)] == [3, 6]


def test_names_are_escaped_and_hosts_show_how_busy_they_were(figure: dict[str, Any]) -> None:
    texts = [annotation["text"] for annotation in figure["layout"]["annotations"]]
    assert sorted(texts) == ["&lt;b&gt;ddp&lt;/b&gt;", "allreduce", "host 50% busy", "host 50% busy"]


def test_records_without_samples_have_no_plot(tmp_path: Path) -> None:
    assert resources(read_comparison(write_experiment(tmp_path))) is None


@pytest.mark.parametrize(
    ("hosts", "said"), [(1, "host 50% busy"), (2, "hosts 50%, 50% busy"), (4, "hosts 50% to 50% busy")]
)
def test_every_host_has_its_figure(tmp_path: Path, hosts: int, said: str) -> None:
    write_experiment(tmp_path, [Candidate("ddp", "ddp")], repeats=1, ranks=hosts)
    run = RunFolder(tmp_path / "repeat-1" / "1")
    file = run.path / "run.json"
    content = json.loads(file.read_text())
    content["topology"]["ranks_per_host"] = 1
    file.write_text(json.dumps(content))
    for rank in range(hosts):
        sample(run, rank, 0, first=True)
    comparison = read_comparison(tmp_path)
    found = resources(comparison)
    assert found is not None
    assert [annotation["text"] for annotation in found["layout"]["annotations"]] == ["ddp", said]
    rows = host_rows(comparison)
    assert [(row.usage.host, row.usage.busy) for row in rows] == [(host, 0.5) for host in range(hosts)]
    columns = {column.heading: column for column in page_columns(HOST_FIGURES, rows)}
    assert columns["Memory of its ranks"].cells[0].text == "100.00"
    assert "Memory in use" in columns
    assert "<h2>CPU and memory during the run</h2>" in (page := render(comparison))
    assert 'id="hosts"' in page


def test_ranks_have_columns_of_gpu_memory_and_garbage_collections(tmp_path: Path) -> None:
    write_experiment(tmp_path, [Candidate("ddp", "ddp")], repeats=1)
    run = RunFolder(tmp_path / "repeat-1" / "1")
    sample(run, 0, 3, device_bytes=3_000_000_000, device_used_bytes=5_000_000_000)
    sample(run, 1, 0)
    columns = {
        column.heading: column for column in page_columns(RANK_FIGURES, read_comparison(tmp_path).row("ddp").ranks)
    }
    assert [cell.text for cell in columns["GPU memory"].cells] == ["3.00", "–"]
    assert [cell.text for cell in columns["GPU memory in use"].cells] == ["5.00", "–"]
    assert [cell.text for cell in columns["GC runs"].cells] == ["3", "0"]
    assert columns["GC time"].cells[0].sort == pytest.approx(0.003)


def test_without_collections_there_is_no_column_for_them(tmp_path: Path) -> None:
    write_experiment(tmp_path, [Candidate("ddp", "ddp")], repeats=1)
    sample(RunFolder(tmp_path / "repeat-1" / "1"), 0, 0)
    assert not {"GC runs", "GPU memory"} & {
        column.heading for column in page_columns(RANK_FIGURES, read_comparison(tmp_path).row("ddp").ranks)
    }
