"""The doctor trains the workload by the recipe of the runs that it is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.doctor.examine import STEPS, examined_config
from paceline.workloads.recipes import choose_recipe

MUON = "muon.toml"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recipe": MUON},
        {"recipe": "classic", "momentum": 0.0},
        {"nesterov": False, "momentum": 0.0},
        {"zero_gamma": False, "cutout": 8, "label_smoothing": 0.0},
    ],
)
def test_the_recipe_is_that_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    (tmp_path / MUON).write_text('optimizer = "muon"\nprecision = "bf16"\n')
    monkeypatch.chdir(tmp_path)
    config = RunConfig(workload="resnet18", epochs=3, **settings)
    examined = examined_config(config)
    assert choose_recipe(examined) == choose_recipe(config)
    assert (examined.steps, examined.epochs, examined.evaluate) == (STEPS, None, False)
