"""Console output of commands."""

from __future__ import annotations

import json

import pytest
from rich.table import Table

from paceline.cli.messages import (
    data_console,
    display_console,
    message_console,
    message_printer,
    print_json,
    show_error,
)
from paceline.errors import LaunchError


def test_json_has_no_nan_and_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "ranks": [{"ratio": float("inf")}, {"ratio": 0.5}], "name": "caf\udce9"})
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=pytest.fail) == {
        "loss": None,
        "ranks": [{"ratio": None}, {"ratio": 0.5}],
        "name": "caf\udce9",
    }
    assert printed.startswith('{\n  "loss": null,\n')


EVIL = "host 1 (\x1b]0;title\x07\x1b[2J\x9b2J)\r"
"""Name of a host that would change the terminal's title and clear it."""


def test_text_of_another_host_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(LaunchError(f"lost {EVIL}", hint=EVIL, detail=f"stack:\n\t{EVIL}"), message_console())
    for console in (message_console(), display_console(), data_console()):
        message_printer(console)(f"lost {EVIL}")
        table = Table("host", EVIL)
        table.add_row(EVIL, "1")
        console.print(table)
    printed = "".join(capsys.readouterr())
    assert printed.count(r"\x1b[2J\x9b2J)\r") == 12
    assert not set("\x1b\x07\x9b\r") & set(printed)
