"""Options from config dataclasses: the command line takes precedence over a TOML file, and that over the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import typer
from typer.main import get_command

from paceline.cli.options import request_parser
from paceline.cli.requests import LaunchRequest
from paceline.config import LaunchConfig, RunConfig, ScaleConfig


@dataclass(frozen=True, kw_only=True)
class ExampleRequest(LaunchRequest):
    """Do something with ranks."""

    command: ClassVar[str] = "example"
    help_texts: ClassVar[dict[str, str]] = {"lr": "Another text."}
    hidden: ClassVar[frozenset[str]] = frozenset({"momentum"})

    extra: Annotated[int, typer.Option(help="An option of the command.")] = 1
    folders: Annotated[tuple[Path, ...], typer.Option("--folder")] = ()
    words: tuple[str, ...] = ()

    def carry_out(self) -> int:
        raise AssertionError("parsing runs nothing")


@dataclass(frozen=True, kw_only=True)
class ExampleScaleRequest(ExampleRequest):
    """Do something at several world sizes."""

    without: ClassVar[frozenset[str]] = frozenset({"strategy"})

    scale: ScaleConfig


def parse(kind: type[ExampleRequest], *arguments: str) -> Any:
    """Parse the arguments of a command without a name."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(request_parser(kind, lambda _: {"words": ("a", "b")}))
    return app(list(arguments), standalone_mode=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('batch_per_rank = 8\nlr = 0.5\nranks = 3\nreshuffle = false\nworkload = "vgg11"\n')
    return path


def test_defaults() -> None:
    assert parse(ExampleRequest) == ExampleRequest(run=RunConfig(), launch=LaunchConfig(), words=("a", "b"))


def test_a_file(file: Path) -> None:
    found = parse(ExampleRequest, "--config", str(file))
    assert found.run == RunConfig(batch_per_rank=8, lr=0.5, reshuffle=False, workload="vgg11")
    assert found.launch == LaunchConfig(ranks=3)


def test_the_command_line_takes_precedence(file: Path) -> None:
    found = parse(ExampleRequest, "cnn", "--config", str(file), "--lr", "0.1", "--reshuffle", "--extra", "2")
    assert found.run == RunConfig(batch_per_rank=8, lr=0.1)
    assert (found.launch.ranks, found.extra) == (3, 2)


def test_an_option_clears_its_alternative_in_the_file(file: Path) -> None:
    found = parse(ExampleRequest, "--config", str(file), "--batch", "64", "--ranks-per-host", "2")
    assert (found.run.batch, found.run.batch_per_rank) == (64, None)
    assert (found.launch.ranks, found.launch.ranks_per_host) == (None, 2)


def test_settings_that_a_command_combines_do_not_clear_each_other(tmp_path: Path) -> None:
    file = tmp_path / "scale.toml"
    file.write_text("ranks-per-host = [1, 2]\nbatch-per-rank = 8\n")
    found = parse(ExampleScaleRequest, "--config", str(file), "--ranks", "2,4", "--batch", "64").scale
    assert (found.ranks, found.ranks_per_host) == ("2,4", "1,2")
    assert (found.batch, found.batch_per_rank) == (64, 8)


def test_an_option_that_may_be_given_several_times_becomes_a_tuple() -> None:
    assert parse(ExampleRequest, "--folder", "a", "--folder", "b").folders == (Path("a"), Path("b"))


def test_the_class_has_the_texts_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    parse(ExampleRequest, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "Do something with ranks." in shown
    assert "An option of the command." in shown
    assert "Another text." in shown
    assert "--momentum" not in shown
    assert parse(ExampleRequest, "--momentum", "0.5").run.momentum == 0.5


def test_a_field_of_several_configs_is_set_in_the_config_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('ranks = "1,2"\nbatch_per_rank = 8\nlr = 0.5\n')
    found = parse(ExampleScaleRequest, "--config", str(file), "--steps", "9", "--threads", "2")
    assert found.scale == ScaleConfig(ranks="1,2", batch_per_rank=8)
    assert (found.run, found.launch) == (RunConfig(lr=0.5, steps=9), LaunchConfig(threads=2))
    assert found.configs == (found.run, found.launch, found.scale)


def test_a_setting_that_a_command_is_without_has_no_option() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(request_parser(ExampleScaleRequest))
    names = [parameter.name for parameter in get_command(app).params]
    assert "strategy" not in names
    assert names.count("ranks") == 1
