"""Tests of tables in the terminal: the columns that fit."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from paceline.report.figures.columns import text_column
from paceline.report.terminal.table import figure_table, fit_columns

COLUMNS = [
    text_column("strategy", ["ddp"]),
    text_column("compute", ["50%"], 4),
    text_column("overlapped", ["20%"], 4),
    text_column("accuracy", ["97%"], 7),
    text_column("memory", ["1 GB"], 2),
]


def test_columns_are_dropped_one_at_a_time_by_priority() -> None:
    left = [[column.heading for column in fit_columns(COLUMNS, width)] for width in range(80, 0, -1)]
    distinct = [one for number, one in enumerate(left) if number == 0 or one != left[number - 1]]
    assert distinct == [
        [column.heading for column in COLUMNS],
        ["strategy", "compute", "overlapped", "accuracy"],
        ["strategy", "compute", "accuracy"],
        ["strategy", "accuracy"],
    ]


def test_columns_that_add_up_are_dropped_together() -> None:
    phases = [replace(text_column(name, ["1 ms"], 3), group="step") for name in ("forward", "backward")]
    columns = [*COLUMNS[:1], *phases, *COLUMNS[3:]]
    left = {tuple(column.heading for column in fit_columns(columns, width)) for width in range(80)}
    assert not [shown for shown in left if ("forward" in shown) != ("backward" in shown)]
    assert ("strategy", "forward", "backward", "accuracy") in left


def test_names_always_stay() -> None:
    columns = [text_column("strategy", ["ddp"], 0), text_column("ranks", ["4"], 0), *COLUMNS[1:]]
    assert [column.heading for column in fit_columns(columns, 1, names=2)] == ["strategy", "ranks", "accuracy"]


def test_markup_in_cells_and_headings_is_text() -> None:
    stream = io.StringIO()
    columns = [text_column("[bold]x", ["[red]a"]), text_column("y", ["1"])]
    Console(file=stream, width=40, color_system=None).print(figure_table(columns, 40))
    assert [line.split() for line in stream.getvalue().splitlines()] == [["[bold]x", "y"], ["[red]a", "1"]]
