"""Tests of the table of figures: every figure is in each output that its entry names, and in no other.

The tests follow from the entries: a new figure needs no new test here.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from rich.console import Console
from rich.table import Table

from batch_on_disk import read_batch_sizes, write_batch_sizes
from examinations import examination
from experiments_on_disk import read_comparison, write_experiment
from large_batches_on_disk import read_large_batches, write_large_batches
from paceline.analysis.batch.points import BatchCurve, BatchSizes
from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.large_batch.results import LargeBatches
from paceline.analysis.ranks import RankRow
from paceline.analysis.scaling.curves import Scaling, ScalingCurve
from paceline.analysis.statistics import Estimate
from paceline.records import RunFolder
from paceline.records.examination import write_examination
from paceline.records.profile import Operator, Profile, write_profile
from paceline.records.schema import ResourceRow
from paceline.records.writer import ResourceWriter
from paceline.report.figures.batch import (
    BATCH_FIGURES,
    BATCH_TABLES,
    NOT_OF_BATCHES,
    OTHER_FIGURES,
    PARTS_IN_FILES,
    SIZE_FIGURES,
)
from paceline.report.figures.candidates import CANDIDATE_FIGURES
from paceline.report.figures.columns import column_of, page_columns, terminal_columns, text_column
from paceline.report.figures.figure import Figure, Output
from paceline.report.figures.large_batch import LARGE_BATCH_FIGURES
from paceline.report.figures.link import ALL_REDUCE_FIGURES, LINK_FIGURES
from paceline.report.figures.machine import HOST_FIGURES, OPERATOR_FIGURES
from paceline.report.figures.points import IN_FILES_ONLY, NOT_OF_POINTS, PART_FIGURES, POINT_FIGURES
from paceline.report.figures.ranks import RANK_FIGURES
from paceline.report.figures.steps import (
    BYTES_FIGURES,
    OPERATION_FIGURES,
    RANK_BYTES_FIGURES,
    SHARE_FIGURES,
    SPLIT_FIGURES,
)
from paceline.report.page.batch import BATCH_DEFINITIONS, render_batch_sizes
from paceline.report.page.comparison import DEFINITIONS, render
from paceline.report.page.large_batch import LARGE_BATCH_DEFINITIONS, render_large_batches
from paceline.report.page.scaling import SCALING_DEFINITIONS, render_scaling
from paceline.report.tables.batch import write_batch_tables
from paceline.report.tables.csv_files import write_tables
from paceline.report.tables.large_batch import write_large_batch_tables
from paceline.report.tables.payload import RankBytesRow, rank_bytes_rows
from paceline.report.tables.profile import profile_rows
from paceline.report.tables.resources import host_rows, profiled_runs
from paceline.report.tables.scaling import write_scaling_tables
from paceline.report.tables.steps import PURPOSES, bytes_rows, operation_rows, rank_split_rows, split_rows
from paceline.report.terminal.batch import TITLES, print_batch_sizes, title_of
from paceline.report.terminal.batch import to_json as batch_json
from paceline.report.terminal.comparison import print_comparison, to_json
from paceline.report.terminal.doctor import print_examination
from paceline.report.terminal.doctor import to_json as doctor_json
from paceline.report.terminal.large_batch import print_large_batches
from paceline.report.terminal.large_batch import to_json as large_batch_json
from paceline.report.terminal.profile import profile_table
from paceline.report.terminal.scaling import print_scaling
from paceline.report.terminal.scaling import to_json as scaling_json
from paceline.report.terminal.table import figure_table
from scaling_on_disk import read_scaling, write_scaling

pytestmark = pytest.mark.takes(2)

Row = TypeVar("Row")
WIDE = 2000
NOT_FIGURES = {"candidate", "split", "ranks", "failure", "exclusion", "is_stopped_by_divergence", "diverged"}
"""Fields of a candidate's row that are no figures: its identity, and its parts."""
TABLES: dict[str, Sequence[Figure[Any]]] = {
    "candidates": CANDIDATE_FIGURES,
    "ranks": RANK_FIGURES,
    "points": (*POINT_FIGURES, *PART_FIGURES),
    "splits": (*SPLIT_FIGURES, *SHARE_FIGURES),
    "bytes": BYTES_FIGURES,
    "bytes by rank": RANK_BYTES_FIGURES,
    "operations": OPERATION_FIGURES,
    "hosts": HOST_FIGURES,
    "operators": OPERATOR_FIGURES,
    "links": LINK_FIGURES,
    "all-reduces": ALL_REDUCE_FIGURES,
    **{f"batch {name}": (*SIZE_FIGURES, *figures) for name, figures in BATCH_TABLES.items()},
    "batch files": (*OTHER_FIGURES, *PARTS_IN_FILES),
    "large batches": LARGE_BATCH_FIGURES,
}


def filled(figures: Sequence[Figure[Row]], row: Row) -> Row:
    """Return the row with a value for every figure that it lacks, or whose usual value hides it."""
    known = {field.name for field in fields(row)}  # type: ignore[arg-type]
    lacking = [f for f in figures if f.key in known and f.number(row) in (None, f.usual)]
    values = {f.key: Estimate(0.25, 0.2, 0.3, 2) if f.is_estimate else 7 for f in lacking}
    return replace(row, **values)  # type: ignore[type-var]


@dataclass(frozen=True)
class Outputs:
    """Everything that is shown of the same rows of a table."""

    rows: Sequence[Any]
    terminal: list[str]
    """Line of headings, then a line per row; empty for a table that the terminal does not show."""
    page: str
    csv: list[dict[str, str]]
    json: list[dict[str, Any]]


def cells_of(page: str, *tables: str) -> str:
    """Return the HTML of some tables, by id; of tables without an id, by a class."""
    found = re.findall(r"<table.*?</table>", page, re.DOTALL)
    chosen = [html for html in found if any(f'id="{table}">' in html or f' {table}">' in html for table in tables)]
    assert chosen
    return "".join(chosen)


def rank_bytes(comparison: Comparison) -> list[RankBytesRow]:
    return rank_bytes_rows(comparison.payloads)


def printed(show: Callable[[Console], object]) -> list[str]:
    stream = io.StringIO()
    show(Console(file=stream, width=WIDE, color_system=None))
    return stream.getvalue().splitlines()


def read_csv(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def candidates_shown(comparison: Comparison, folder: Path) -> Outputs:
    write_tables(comparison, folder)
    return Outputs(
        comparison.rows,
        printed(lambda console: print_comparison(comparison, console)),
        cells_of(render(comparison), "comparison"),
        read_csv(folder / "comparison.csv"),
        json.loads(json.dumps(to_json(comparison)))["rows"],
    )


def measure(path: Path) -> None:
    """Add an examination, and samples and a profile of every run under `ddp`, with a GPU."""
    write_examination(path, examination())
    for run in (RunFolder(path / f"repeat-{repeat}" / "4") for repeat in (1, 2, 3)):
        for rank in range(3):
            writer = ResourceWriter(run, rank)
            base = ResourceRow(0, 0, 100, 4, 0, 5, 6, 0.5, 11, 12, 0.9, 400.0, None, 1980, 0, 0)
            writer.write([base._replace(time_s=time_s, cpu_s=time_s / 2) for time_s in (0.0, 5.0)])
            writer.close()
        write_profile(Profile(5, 6, 0.1, [Operator("aten::mm", 3, 0.3, 0.4, 0.5, 0.6)], rest=None), run, 0)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Comparison in which every figure has a value."""
    path = write_experiment(tmp_path_factory.mktemp("comparison") / "e", repeats=3, ranks=3, events=True)
    measure(path)
    found = read_comparison(path)
    rows = [filled(CANDIDATE_FIGURES, row) for row in found.rows]
    full = replace(found, rows=[replace(row, ranks=[filled(RANK_FIGURES, r) for r in row.ranks]) for row in rows])
    sent = {purpose: [4000, 4000, 4000] for purpose in PURPOSES}
    vars(full)["wires"] = {name: replace(wire, sent_bytes=sent) for name, wire in found.wires.items()}
    vars(full)["payloads"] = {
        name: replace(payload, ranks=[replace(rank, retransmitted_bytes=9.0) for rank in payload.ranks])
        for name, payload in found.payloads.items()
    }
    return full


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> Scaling:
    """Scaling experiment in which every figure has a value."""
    found = read_scaling(write_scaling(tmp_path_factory.mktemp("scaling") / "e", repeats=3, events=True))

    def with_figures(curve: ScalingCurve) -> ScalingCurve:
        return replace(curve, points=[replace(p, row=filled(CANDIDATE_FIGURES, p.row)) for p in curve.points])

    return replace(found, curves=[with_figures(curve) for curve in found.curves])


def points_shown(scaling: Scaling, folder: Path) -> Outputs:
    write_scaling_tables(scaling, folder)
    return Outputs(
        scaling.points("strong"),
        printed(lambda console: print_scaling(scaling, console))[1:],
        cells_of(render_scaling(scaling), "strong-points", "strong-parts"),
        read_csv(folder / "scaling.csv"),
        json.loads(json.dumps(scaling_json(scaling)))["modes"]["strong"]["points"],
    )


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> BatchSizes:
    """Experiment over batch sizes in which every figure has a value."""
    path = write_batch_sizes(tmp_path_factory.mktemp("batch") / "e", is_tested=True)
    write_examination(path, examination())
    found = read_batch_sizes(path)

    def with_figures(curve: BatchCurve) -> BatchCurve:
        points = [replace(p, row=filled(CANDIDATE_FIGURES, p.row), hosts=2) for p in curve.points]
        return replace(curve, points=points, hosts=2)

    return replace(found, curves=[with_figures(curve) for curve in found.curves])


def batches_shown(batches: BatchSizes, folder: Path) -> dict[str, Outputs]:
    write_batch_tables(batches, folder)
    lines = printed(lambda console: print_batch_sizes(batches, console))
    page, rows = render_batch_sizes(batches), read_csv(folder / "batch_sizes.csv")
    data = json.loads(json.dumps(batch_json(batches)))["points"]
    found = {
        f"batch {name}": Outputs(
            batches.points,
            lines[lines.index(title_of(batches, name)) + 1 :],
            cells_of(page, f"batch-{name}"),
            rows,
            data,
        )
        for name in TITLES
    }
    return found | {"batch files": Outputs(batches.points, [], "", rows, data)}


@pytest.fixture(scope="module")
def large_batches(tmp_path_factory: pytest.TempPathFactory) -> LargeBatches:
    """Experiment with large batches in which every figure has a value."""
    path = write_large_batches(tmp_path_factory.mktemp("large") / "e", diverged=[("320 linear", 1)])
    return read_large_batches(path)


def large_batches_shown(found: LargeBatches, folder: Path) -> Outputs:
    write_large_batch_tables(found, folder)
    lines = printed(lambda console: print_large_batches(found, console))
    return Outputs(
        found.rows,
        lines[next(place for place, line in enumerate(lines) if line.split()[:2] == ["batch", "remedies"]) :],
        cells_of(render_large_batches(found), "large-batch"),
        read_csv(folder / "large_batch.csv"),
        json.loads(json.dumps(large_batch_json(found)))["candidates"],
    )


def examination_shown() -> dict[str, Outputs]:
    """Return the outputs of the doctor's tables, which neither the page nor CSV files have."""
    found = examination()
    assert found.link is not None
    lines = printed(lambda console: print_examination(found, console))
    data = json.loads(json.dumps(doctor_json(found, Path())))["examination"]["link"]

    def outputs(rows: Sequence[Any], heading: str, values: list[dict[str, Any]]) -> Outputs:
        start = next(place for place, line in enumerate(lines) if line.split()[:1] == [heading])
        return Outputs(rows, lines[start:], "", [{}] * len(rows), values)

    return {
        "links": outputs(found.link.pairs, "link", data["pairs"]),
        "all-reduces": outputs(found.link.all_reduces[0].points, "size", data["all_reduces"][0]["points"]),
    }


def table_of(table: str, rows: Sequence[Any]) -> Table:
    """Return a table as the terminal shows it for a run."""
    return figure_table([text_column("rank", [""] * len(rows)), *terminal_columns(TABLES[table], rows)], WIDE)


@pytest.fixture(scope="module")
def shown(
    comparison: Comparison,
    scaling: Scaling,
    batches: BatchSizes,
    large_batches: LargeBatches,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Outputs]:
    """Outputs of every table, by its name."""
    folder = tmp_path_factory.mktemp("csv")
    candidates = candidates_shown(comparison, folder)
    page, data = render(comparison), json.loads(json.dumps(to_json(comparison)))

    def outputs(rows: Sequence[Any], file: str, tables: Sequence[str], values: Iterable[Any]) -> Outputs:
        return Outputs(rows, [], cells_of(page, *tables), read_csv(folder / file), list(values))

    splits = [row["split"] for row in data["rows"]]
    in_splits = [split["mean"] for split in splits] + [rank for split in splits for rank in split["ranks"].values()]
    sending = [data["payload"][name]["ranks"] for name in dict.fromkeys(r.candidate for r in rank_bytes(comparison))]
    wires, resources, operators = data["wire"].values(), data["resources"].values(), data["operators"].values()
    ranks = [rank for row in comparison.rows for rank in row.ranks]
    profiled = profiled_runs(comparison)["ddp"]
    operator_rows = [row for run in profiled_runs(comparison).values() for row in profile_rows(run)]
    found = {
        "ranks": outputs(ranks, "ranks.csv", ["by-rank"], (rank for row in data["rows"] for rank in row["ranks"])),
        "splits": outputs(
            [*split_rows(comparison), *rank_split_rows(comparison)],
            "splits.csv",
            ["splits", "splits-by-rank"],
            in_splits,
        ),
        "bytes": outputs(bytes_rows(comparison), "bytes.csv", ["bytes"], (w["bytes"] for w in wires if w["bytes"])),
        "bytes by rank": outputs(
            rank_bytes(comparison), "bytes_by_rank.csv", ["bytes-by-rank"], (rank for own in sending for rank in own)
        ),
        "operations": outputs(
            operation_rows(comparison), "operations.csv", ["operations"], (row for w in wires for row in w["traffic"])
        ),
        "hosts": outputs(
            host_rows(comparison), "hosts.csv", ["hosts"], (host for own in resources for host in own["hosts"])
        ),
        "operators": outputs(operator_rows, "operators.csv", ["operators"], (row for own in operators for row in own)),
    }
    in_terminal = {
        "ranks": table_of("ranks", ranks),
        "splits": table_of("splits", found["splits"].rows),
        "operators": profile_table(profiled, WIDE),
    }
    for name, table in in_terminal.items():
        found[name] = replace(found[name], terminal=printed(lambda console, table=table: console.print(table)))
    unsplit = replace(comparison, rows=[replace(row, split=None) for row in comparison.rows])
    return found | {
        **examination_shown(),
        "candidates": candidates,
        "candidates without a time split": candidates_shown(unsplit, tmp_path_factory.mktemp("csv")),
        "points": points_shown(scaling, tmp_path_factory.mktemp("csv")),
        **batches_shown(batches, tmp_path_factory.mktemp("csv")),
        "large batches": large_batches_shown(large_batches, tmp_path_factory.mktemp("csv")),
    }


@pytest.mark.parametrize(
    ("table", "figure"),
    [pytest.param(table, figure, id=f"{table}-{figure.key}") for table in TABLES for figure in TABLES[table]],
)
def test_a_figure_is_in_the_outputs_it_names(table: str, figure: Figure[Any], shown: dict[str, Outputs]) -> None:
    own = shown[f"{table} without a time split" if figure.in_place_of else table]
    assert len(own.rows) <= min(len(own.csv), len(own.json)), "the files may have more rows, such as another mode"
    numbers = [figure.number(row) for row in own.rows]
    place, value = next((place, value) for place, value in enumerate(numbers) if value not in (None, figure.usual))
    assert value is not None
    check_tables(table, figure, own, place, value)
    assert (figure.key in own.csv[place]) == (Output.CSV in figure.outputs)
    assert (figure.key in own.json[place]) == (Output.JSON in figure.outputs)
    if Output.CSV in figure.outputs:
        assert float(own.csv[place][figure.key]) == value
        assert (f"{figure.key}_low" in own.csv[place]) == figure.is_estimate
    if Output.JSON in figure.outputs:
        written = own.json[place][figure.key]
        assert (written["value"] if figure.is_estimate else written) == value


def check_tables(table: str, figure: Figure[Any], own: Outputs, place: int, value: float) -> None:
    """Check that the terminal and the page show the figure where its entry names them."""
    if figure.terminal is not None:
        heading, *lines = own.terminal
        assert figure.terminal.heading in heading or figure.key == "ratio", "which names the reference"
        assert column_of(TABLES[table], figure.key, own.rows).texts[place].strip() in lines[place]
    on_page = [other.defined.key for other in TABLES[table] if other.page]
    assert (f'data-define="{figure.defined.key}"' in own.page) == (figure.defined.key in on_page)
    assert not figure.page or f'data-sort="{value}"' in own.page


def test_points_have_the_figures_of_candidates() -> None:
    of_points = {figure.key: figure for figure in POINT_FIGURES}
    for figure in CANDIDATE_FIGURES:
        if figure.key in of_points:
            same = figure.key == "batch" or of_points[figure.key].defined == figure.defined
            assert same, f"{figure.key} has two definitions"
        else:
            assert figure.key in NOT_OF_POINTS
    keys = {figure.key for figure in CANDIDATE_FIGURES}
    assert keys >= NOT_OF_POINTS | IN_FILES_ONLY, "no exception for a figure that there is not"


def test_batch_sizes_have_the_figures_of_candidates() -> None:
    of_batches = {figure.key: figure for figure in BATCH_FIGURES}
    keys = {figure.key for figure in CANDIDATE_FIGURES}
    assert keys - NOT_OF_BATCHES <= of_batches.keys()
    assert keys >= NOT_OF_BATCHES, "no exception for a figure that there is not"
    assert len(of_batches) == len(BATCH_FIGURES), "each figure is in one table"


@pytest.mark.parametrize(("row", "figures"), [(CandidateRow, CANDIDATE_FIGURES), (RankRow, RANK_FIGURES)])
def test_every_field_of_a_row_is_a_figure(row: type, figures: Sequence[Figure[Any]]) -> None:
    keys = {figure.key for figure in figures}
    assert {field.name for field in fields(row)} - NOT_FIGURES - {"rank"} <= keys


@pytest.mark.parametrize("figures", TABLES.values(), ids=TABLES)
def test_entries_are_complete(figures: Sequence[Figure[Any]]) -> None:
    keys = [figure.key for figure in figures]
    assert len(set(keys)) == len(keys)
    for figure in figures:
        assert figure.heading
        assert figure.defined.text.endswith("."), figure.key
        assert figure.in_place_of in ("", *keys)


def test_pages_define_all_their_figures() -> None:
    other_pages = ("points", "large batches", *[table for table in TABLES if table.startswith("batch ")])
    of_comparison = [figures for table, figures in TABLES.items() if table not in other_pages]
    pages = (
        (DEFINITIONS, of_comparison),
        (SCALING_DEFINITIONS, [TABLES["points"]]),
        (BATCH_DEFINITIONS, [BATCH_FIGURES]),
        (LARGE_BATCH_DEFINITIONS, [LARGE_BATCH_FIGURES]),
    )
    for known, tables in pages:
        for figure in (figure for figures in tables for figure in figures if figure.page):
            assert known[figure.defined.key] == figure.defined


def test_an_unmeasured_candidate_has_all_keys_and_the_column_of_times(tmp_path: Path) -> None:
    unmeasured = read_comparison(write_experiment(tmp_path / "e", repeats=0, proof=False))
    found = candidates_shown(unmeasured, tmp_path / "csv")
    keys = {figure.key for figure in CANDIDATE_FIGURES}
    assert keys <= found.csv[0].keys()
    assert keys <= found.json[0].keys()
    assert (found.csv[0]["step_s"], found.csv[0]["step_s_low"], found.json[0]["step_s"]) == ("", "", None)
    assert "Median time per step" in found.page
    assert found.terminal[0].split() == ["strategy", "time/step"]


def test_columns_of_one_heading_are_joined_in_the_terminal(scaling: Scaling) -> None:
    columns = {column.heading: column for column in terminal_columns(POINT_FIGURES, scaling.points("strong"))}
    texts = columns["vs single"].texts
    assert texts[0].strip() == "–", "one process has no speed-up over itself, and no efficiency"
    assert re.fullmatch(r"[\d.]+× ±\d+% +\d+%", texts[-1].strip())
    assert len({len(text) for text in texts}) == 1, "aligned"


def test_a_figure_that_is_everywhere_as_usual_has_no_column(comparison: Comparison) -> None:
    ranks = [replace(rank, collections=0.0) for rank in comparison.rows[0].ranks]
    assert "collections" not in {column.key for column in page_columns(RANK_FIGURES, ranks)}
    ranks[0] = replace(ranks[0], collections=2.0)
    (column,) = [column for column in page_columns(RANK_FIGURES, ranks) if column.key == "collections"]
    assert [cell.text for cell in column.cells] == ["2", "0", "0"]


def test_nothing_sent_is_a_plain_zero(comparison: Comparison) -> None:
    rows = [
        replace(row, busiest_sent_bytes=size) for row, size in zip(comparison.rows, (0, 4000, 4000, 4), strict=True)
    ]
    (column,) = [column for column in terminal_columns(CANDIDATE_FIGURES, rows) if column.key == "busiest_sent_bytes"]
    assert column.texts == ["0 B", "4.0000 kB", "4.0000 kB", "0.0040 kB"]
