"""Tests of the table of figures: every figure is in each output that its entry names, and in no other.

The tests follow from the entries: a new figure needs no new test here.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from rich.console import Console

from experiments_on_disk import read_comparison, write_experiment
from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.ranks import RankRow
from paceline.analysis.scaling.curves import Scaling, ScalingPoint
from paceline.analysis.statistics import Estimate
from paceline.formatting import unit_for
from paceline.report.figures.candidates import CANDIDATE_FIGURES
from paceline.report.figures.columns import Column, page_columns, terminal_columns
from paceline.report.figures.figure import Figure, Output
from paceline.report.figures.machine import HOST_FIGURES, OPERATOR_FIGURES
from paceline.report.figures.points import PART_FIGURES, POINT_FIGURES
from paceline.report.figures.ranks import RANK_FIGURES
from paceline.report.figures.steps import BYTES_FIGURES, OPERATION_FIGURES, RANK_BYTES_FIGURES, SPLIT_FIGURES
from paceline.report.page.comparison import DEFINITIONS, render
from paceline.report.page.scaling import SCALING_DEFINITIONS, render_scaling
from paceline.report.tables.csv_files import write_tables
from paceline.report.tables.scaling import write_scaling_tables
from paceline.report.terminal.comparison import print_comparison, to_json
from paceline.report.terminal.scaling import print_scaling
from paceline.report.terminal.scaling import to_json as scaling_json
from scaling_on_disk import read_scaling, write_scaling

pytestmark = pytest.mark.takes(8)

Row = TypeVar("Row")
WIDE = 2000
NOT_FIGURES = {"candidate", "split", "ranks", "failure"}
"""Fields of a candidate's row that are no figures: its identity, and its parts."""
TABLES: dict[str, Sequence[Figure[Any]]] = {
    "candidates": CANDIDATE_FIGURES,
    "ranks": RANK_FIGURES,
    "points": (*POINT_FIGURES, *PART_FIGURES),
    "splits": SPLIT_FIGURES,
    "bytes": BYTES_FIGURES,
    "bytes by rank": RANK_BYTES_FIGURES,
    "operations": OPERATION_FIGURES,
    "hosts": HOST_FIGURES,
    "operators": OPERATOR_FIGURES,
}


def filled(figures: Sequence[Figure[Row]], row: Row) -> Row:
    """Return the row with a value for every figure that it lacks, or whose usual value hides it."""
    known = {field.name for field in fields(row)}  # type: ignore[arg-type]
    lacking = [f for f in figures if f.key in known and f.number(row) in (None, f.usual)]
    values = {f.key: Estimate(0.25, 0.2, 0.3, 2) if f.is_estimate else 7 for f in lacking}
    return replace(row, **values)  # type: ignore[type-var]


@dataclass(frozen=True)
class Outputs:
    """Everything that is shown of the same rows."""

    rows: Sequence[Any]
    terminal: str
    page: str
    csv: list[dict[str, str]]
    json: list[dict[str, Any]]


def cells_of(page: str, table: str) -> str:
    """Return the HTML of one table."""
    found = re.search(rf'<table[^>]* id="{table}">.*?</table>', page, re.DOTALL)
    assert found is not None
    return found[0]


def outputs_of(comparison: Comparison, folder: Path) -> Outputs:
    stream = io.StringIO()
    print_comparison(comparison, Console(file=stream, width=WIDE, color_system=None))
    write_tables(comparison, folder)
    return Outputs(
        comparison.rows,
        stream.getvalue(),
        cells_of(render(comparison), "comparison"),
        list(csv.DictReader((folder / "comparison.csv").read_text().splitlines())),
        json.loads(json.dumps(to_json(comparison)))["rows"],
    )


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Comparison in which every figure has a value."""
    path = write_experiment(tmp_path_factory.mktemp("comparison") / "e", repeats=3, ranks=3, events=True)
    found = read_comparison(path)
    rows = [filled(CANDIDATE_FIGURES, row) for row in found.rows]
    return replace(found, rows=[replace(row, ranks=[filled(RANK_FIGURES, r) for r in row.ranks]) for row in rows])


@pytest.fixture(scope="module")
def with_events(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return outputs_of(comparison, tmp_path_factory.mktemp("csv"))


@pytest.fixture(scope="module")
def without_events(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    rows = [replace(row, split=None) for row in comparison.rows]
    return outputs_of(replace(comparison, rows=rows), tmp_path_factory.mktemp("csv"))


@pytest.mark.parametrize("figure", CANDIDATE_FIGURES, ids=lambda figure: figure.key)
def test_a_candidates_figure_is_in_the_outputs_it_names(
    figure: Figure[CandidateRow], with_events: Outputs, without_events: Outputs
) -> None:
    shown = without_events if figure.in_place_of else with_events
    place = next(place for place, row in enumerate(shown.rows) if figure.number(row) is not None)
    value = figure.number(shown.rows[place])
    assert value is not None
    known = [number for row in shown.rows if (number := figure.number(row)) is not None]
    text = unit_for(known, figure.format).text(value) if value else "0"
    if figure.terminal is not None:
        line = shown.terminal.splitlines()[1 + place]
        assert text in line
        assert figure.terminal.heading in shown.terminal.splitlines()[0] or figure.key == "ratio"
    assert (f'data-define="{figure.defined.key}"' in shown.page) == (Output.PAGE in figure.outputs)
    assert (f'data-sort="{value}"' in shown.page) or Output.PAGE not in figure.outputs
    assert (figure.key in shown.csv[place]) == (Output.CSV in figure.outputs)
    assert (figure.key in shown.json[place]) == (Output.JSON in figure.outputs)
    if Output.CSV in figure.outputs:
        assert float(shown.csv[place][figure.key]) == value
        assert (f"{figure.key}_low" in shown.csv[place]) == figure.is_estimate
    if Output.JSON in figure.outputs:
        written = shown.json[place][figure.key]
        assert (written["value"] if figure.is_estimate else written) == value


@pytest.mark.parametrize("figure", RANK_FIGURES, ids=lambda figure: figure.key)
def test_a_ranks_figure_is_in_the_outputs_it_names(
    figure: Figure[RankRow], comparison: Comparison, tmp_path_factory: pytest.TempPathFactory
) -> None:
    row = comparison.rows[0]
    value = figure.number(row.ranks[0])
    columns: dict[Output, Callable[[Sequence[Figure[RankRow]], Sequence[RankRow]], list[Column]]] = {
        Output.PAGE: page_columns,
        Output.TERMINAL: terminal_columns,
    }
    for output, make in columns.items():
        by_key = {column.key: column for column in make(RANK_FIGURES, row.ranks)}
        assert (figure.key in by_key) == (output in figure.outputs)
        assert figure.key not in by_key or by_key[figure.key].cells[0].sort == value
    folder = tmp_path_factory.mktemp("csv")
    write_tables(comparison, folder)
    (first, *_) = csv.DictReader((folder / "ranks.csv").read_text().splitlines())
    assert float(first[figure.key]) == value
    assert to_json(comparison)["rows"][0]["ranks"][0][figure.key] == value


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> Scaling:
    return read_scaling(write_scaling(tmp_path_factory.mktemp("scaling") / "e", repeats=3, events=True))


@pytest.fixture(scope="module")
def of_points(scaling: Scaling, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    stream, folder = io.StringIO(), tmp_path_factory.mktemp("csv")
    print_scaling(scaling, Console(file=stream, width=WIDE, color_system=None))
    write_scaling_tables(scaling, folder)
    page = render_scaling(scaling)
    return Outputs(
        scaling.points("strong"),
        stream.getvalue(),
        cells_of(page, "strong-points") + cells_of(page, "strong-parts"),
        list(csv.DictReader((folder / "scaling.csv").read_text().splitlines())),
        json.loads(json.dumps(scaling_json(scaling)))["modes"]["strong"]["points"],
    )


@pytest.mark.parametrize("figure", [*POINT_FIGURES, *PART_FIGURES], ids=lambda figure: figure.key)
def test_a_points_figure_is_in_the_outputs_it_names(figure: Figure[ScalingPoint], of_points: Outputs) -> None:
    place = len(of_points.rows) - 1
    value = figure.number(of_points.rows[place])
    assert value is not None
    known = [number for row in of_points.rows if (number := figure.number(row)) is not None]
    if figure.terminal is not None:
        heading, *lines = of_points.terminal.splitlines()[1:]
        assert figure.terminal.heading in heading
        assert unit_for(known, figure.format).text(value) in lines[place]
    assert (f'data-sort="{value}"' in of_points.page) or Output.PAGE not in figure.outputs
    assert (figure.key in of_points.csv[place]) == (Output.CSV in figure.outputs)
    assert figure.key not in of_points.csv[place] or float(of_points.csv[place][figure.key]) == value
    if Output.JSON in figure.outputs:
        written = of_points.json[place][figure.key]
        assert (written["value"] if figure.is_estimate else written) == value


@pytest.mark.parametrize(("row", "figures"), [(CandidateRow, CANDIDATE_FIGURES), (RankRow, RANK_FIGURES)])
def test_every_field_of_a_row_is_a_figure(row: type, figures: Sequence[Figure[Any]]) -> None:
    keys = {figure.key for figure in figures}
    assert {field.name for field in fields(row)} - NOT_FIGURES - {"rank"} <= keys


@pytest.mark.parametrize("figures", TABLES.values(), ids=TABLES)
def test_entries_are_complete(figures: Sequence[Figure[Any]]) -> None:
    keys = [figure.key for figure in figures]
    assert len(set(keys)) == len(keys)
    for figure in figures:
        assert figure.outputs
        assert figure.heading
        assert figure.defined.text.endswith("."), figure.key
        assert figure.in_place_of in ("", *keys)


def test_pages_define_all_their_figures() -> None:
    of_comparison = [figures for table, figures in TABLES.items() if table != "points"]
    for known, tables in ((DEFINITIONS, of_comparison), (SCALING_DEFINITIONS, [TABLES["points"]])):
        for figure in (figure for figures in tables for figure in figures if figure.page):
            assert known[figure.defined.key] == figure.defined


def test_an_unmeasured_candidate_has_all_keys_and_the_column_of_times(tmp_path: Path) -> None:
    found = outputs_of(read_comparison(write_experiment(tmp_path / "e", repeats=0, proof=False)), tmp_path / "csv")
    keys = {figure.key for figure in CANDIDATE_FIGURES}
    assert keys <= found.csv[0].keys()
    assert keys <= found.json[0].keys()
    assert (found.csv[0]["step_s"], found.csv[0]["step_s_low"], found.json[0]["step_s"]) == ("", "", None)
    assert "Median time per step" in found.page
    assert found.terminal.splitlines()[0].split() == ["strategy", "time/step"]


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
