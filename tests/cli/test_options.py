"""The command line over a file over the defaults."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import takes
from paceline.config import LaunchConfig, RunConfig, ScaleConfig


@takes(RunConfig, LaunchConfig)
def command(run: RunConfig, launch: LaunchConfig, *, extra: int = 1) -> tuple[RunConfig, LaunchConfig, int]:
    return run, launch, extra


def call(**given: Any) -> tuple[RunConfig, LaunchConfig, int]:
    """Calls it as typer does: with every option, None where it was not given."""
    every = {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}
    result: tuple[RunConfig, LaunchConfig, int] = command(**every | given)
    return result


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('batch_per_rank = 8\nlr = 0.5\nranks = 3\nreshuffle = false\nworkload = "vgg11"\n')
    return path


def test_defaults() -> None:
    assert call() == (RunConfig(), LaunchConfig(), 1)


def test_a_file(file: Path) -> None:
    run, launch, _ = call(config_file=file)
    assert (run.batch_per_rank, run.lr, run.reshuffle, run.workload, launch.ranks) == (8, 0.5, False, "vgg11", 3)


def test_the_command_line_wins(file: Path) -> None:
    run, launch, extra = call(config_file=file, lr=0.1, reshuffle=True, workload="cnn", extra=2)
    assert (run.lr, run.reshuffle, run.workload, launch.ranks, extra) == (0.1, True, "cnn", 3, 2)


def test_the_command_line_wins_over_the_other_way_to_say_it(file: Path) -> None:
    run, launch, _ = call(config_file=file, batch=64, ranks_per_host=2)
    assert (run.batch, run.batch_per_rank, launch.ranks, launch.ranks_per_host) == (64, None, None, 2)


@takes(ScaleConfig, RunConfig, LaunchConfig, without=frozenset({"strategy"}))
def scaled(scale: ScaleConfig, run: RunConfig, launch: LaunchConfig) -> tuple[ScaleConfig, RunConfig, LaunchConfig]:
    return scale, run, launch


def test_a_setting_of_several_belongs_to_the_first(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('ranks = "1,2"\nbatch_per_rank = 8\nlr = 0.5\n')
    nothing = {name: None for name in inspect.signature(scaled).parameters}
    found = scaled(**nothing | {"config_file": file, "steps": 9, "threads": 2})
    assert found == (ScaleConfig(ranks="1,2", batch_per_rank=8), RunConfig(lr=0.5, steps=9), LaunchConfig(threads=2))
    assert [name for name in inspect.signature(scaled).parameters].count("ranks") == 1
