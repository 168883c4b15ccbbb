"""Options from config dataclasses: the command line takes precedence over a TOML file, and that over the defaults."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import config_options
from paceline.config import LaunchConfig, RunConfig, ScaleConfig


@config_options(RunConfig, LaunchConfig)
def command(run: RunConfig, launch: LaunchConfig, *, extra: int = 1) -> tuple[RunConfig, LaunchConfig, int]:
    return run, launch, extra


def call(**given: Any) -> tuple[RunConfig, LaunchConfig, int]:
    """Call the command as typer does: with every option, None for those not given."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}
    result: tuple[RunConfig, LaunchConfig, int] = command(**defaults | given)
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


def test_the_command_line_takes_precedence(file: Path) -> None:
    run, launch, extra = call(config_file=file, lr=0.1, reshuffle=True, workload="cnn", extra=2)
    assert (run.lr, run.reshuffle, run.workload, launch.ranks, extra) == (0.1, True, "cnn", 3, 2)


def test_an_option_clears_its_alternative_in_the_file(file: Path) -> None:
    run, launch, _ = call(config_file=file, batch=64, ranks_per_host=2)
    assert (run.batch, run.batch_per_rank, launch.ranks, launch.ranks_per_host) == (64, None, None, 2)


@config_options(ScaleConfig, RunConfig, LaunchConfig, without=frozenset({"strategy"}))
def scale_command(
    scale: ScaleConfig, run: RunConfig, launch: LaunchConfig
) -> tuple[ScaleConfig, RunConfig, LaunchConfig]:
    return scale, run, launch


def test_a_field_of_several_configs_is_set_in_the_first(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('ranks = "1,2"\nbatch_per_rank = 8\nlr = 0.5\n')
    not_given = {name: None for name in inspect.signature(scale_command).parameters}
    found = scale_command(**not_given | {"config_file": file, "steps": 9, "threads": 2})
    assert found == (ScaleConfig(ranks="1,2", batch_per_rank=8), RunConfig(lr=0.5, steps=9), LaunchConfig(threads=2))
    assert [name for name in inspect.signature(scale_command).parameters].count("ranks") == 1
