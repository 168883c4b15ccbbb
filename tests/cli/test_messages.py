"""Console output of commands."""

from __future__ import annotations

import json

import pytest

from paceline.cli.messages import print_json


def test_json_has_no_nan_and_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "ranks": [{"ratio": float("inf")}, {"ratio": 0.5}], "name": "caf\udce9"})
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=pytest.fail) == {
        "loss": None,
        "ranks": [{"ratio": None}, {"ratio": 0.5}],
        "name": "caf\udce9",
    }
    assert printed.startswith('{\n  "loss": null,\n')
