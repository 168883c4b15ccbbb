"""What the documentation says holds: its commands parse, its links lead somewhere, its code runs."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

import paceline
from paceline.cli.main import app, run
from paceline.config import (
    BatchConfig,
    CompareConfig,
    LargeBatchConfig,
    LaunchConfig,
    RaceConfig,
    RunConfig,
    ScaleConfig,
)
from paceline.config.emulation import EmulationInfo
from paceline.config.recipe import Recipe
from paceline.errors import INTERRUPTED_EXIT_CODE
from paceline.experiments import train as experiment
from paceline.experiments.batch_sizes.points import choose_batch_shapes, make_batch_points
from paceline.experiments.candidates import make_candidates
from paceline.experiments.large_batches.candidates import make_large_batch_candidates
from paceline.experiments.large_batches.trained_workload import TrainedWorkload
from paceline.experiments.names import check_names
from paceline.experiments.race import make_candidate, run_config
from paceline.experiments.scaling.points import make_points
from paceline.experiments.scaling.shapes import choose_shapes
from paceline.launch.launcher_process import LauncherProcess, Shape
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.storage import CheckpointFolder
from training.checkpoints.storage.states import info

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS: tuple[Any, ...] = (
    RunConfig,
    LaunchConfig,
    CompareConfig,
    ScaleConfig,
    BatchConfig,
    LargeBatchConfig,
    RaceConfig,
)
PLACES = {"ADDRESS:PORT": "198.18.0.1:29500", "R": "1", "FILE": "settings.toml"}
"""What stands for something else in a command."""
EMULATED = EmulationInfo(spec="4", host=0, hosts=4, master="198.18.0.1:29500")


def commands() -> list[tuple[str, str]]:
    """Every whole `paceline …` command of the pages, in code blocks and in line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`(paceline [^`…]+)`", text)
        found += [(page.name, line.partition("#")[0].strip()) for line in lines if line.startswith("paceline ")]
    return found


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 10


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_parse(page: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked: list[RunConfig] = []

    def remember(config: RunConfig, *_: Any) -> None:
        asked.append(config)

    def enter(config: RunConfig, launch: LaunchConfig, compare: CompareConfig, *_: Any, **__: Any) -> None:
        make_candidates(config, compare, Shape(launch.hosts, launch.local_ranks(default=2)))
        raise KeyboardInterrupt  # Everything that can be known without starting a rank is known.

    def climb(config: RunConfig, launch: LaunchConfig, scale: ScaleConfig, *_: Any) -> None:
        make_points(config, scale, choose_shapes(scale, LauncherProcess(launchers=launch.hosts), on_one_host=2))
        raise KeyboardInterrupt

    def vary(config: RunConfig, launch: LaunchConfig, batch: BatchConfig, *_: Any) -> None:
        shapes = choose_batch_shapes(batch, LauncherProcess(launchers=launch.hosts), on_one_host=2)
        make_batch_points(config, batch, shapes)
        raise KeyboardInterrupt

    def enlarge(config: RunConfig, launch: LaunchConfig, large_batch: LargeBatchConfig, *_: Any) -> None:
        known = TrainedWorkload(Recipe(), samples=50_000, has_residual_norms=config.workload == "resnet18")
        shape = Shape(launch.hosts, launch.local_ranks(default=2))
        make_large_batch_candidates(replace(config, epochs=1), large_batch, known, shape, 1024)
        raise KeyboardInterrupt

    def enter_race(config: RunConfig, launch: LaunchConfig, race: RaceConfig, *_: Any) -> None:
        make_candidate(run_config(config, race), Shape(launch.hosts, launch.local_ranks(default=2)))
        raise KeyboardInterrupt

    def read(folder: Path) -> None:
        assert folder
        raise KeyboardInterrupt

    def find(folders: list[Path]) -> None:
        assert folders
        raise KeyboardInterrupt

    def resume(config: RunConfig, *_: Any) -> None:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.experiments.resume.prepare_resume", resume)
    monkeypatch.setattr(experiment, "train", remember)
    monkeypatch.setattr("paceline.experiments.doctor.doctor", remember)
    monkeypatch.setattr("paceline.experiments.compare.compare", enter)
    monkeypatch.setattr("paceline.experiments.scale.scale", climb)
    monkeypatch.setattr("paceline.experiments.batch.batch", vary)
    monkeypatch.setattr("paceline.experiments.large_batch.large_batch", enlarge)
    monkeypatch.setattr("paceline.experiments.race.race", enter_race)
    monkeypatch.setattr("paceline.analysis.race.leaderboard.read_leaderboard", read)
    monkeypatch.setattr("paceline.records.find.find_records", find)
    monkeypatch.setattr("paceline.cli.submit.submit_job", lambda *_: 1)
    if "--emulate" in command:  # As on a host that was made for it.
        monkeypatch.setenv("PACELINE_EMULATED", EMULATED.variables()["PACELINE_EMULATED"])
    words = [PLACES.get(word, word) for word in shlex.split(command)[1:]]
    assert run(words) in (0, INTERRUPTED_EXIT_CODE), f"{page}: {command}: {capsys.readouterr().err}"
    own = [config for config in asked if ":" in config.workload or "my_" in config.strategy]
    for config in asked:
        if config not in own:
            check_names(config)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_named_in_the_text_exist(page: Path) -> None:
    places = (ROOT, ROOT / "src" / "paceline")
    for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text()):
        assert any((place / path).is_file() for place in places), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text()):
        other = page.parent / target if target else page
        headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{target}#{anchor}"


def test_options_named_in_the_text_exist() -> None:
    known = {f"--{name.replace('_', '-')}" for kind in KINDS for name in kind.__dataclass_fields__}
    known |= {f"--no-{name.removeprefix('--')}" for name in known}
    known |= {"--out", "--json", "--csv", "--config", "--help", "--no-reshuffle", "--nproc-per-node", "--logdir"}
    known |= {"--list", "--only", "--write", "--faults", "--host", "--rounds"}  # Of benchmarks.
    for name in ("submit", "train", "race"):
        known |= {option for parameter in get_command(app).commands[name].params for option in parameter.opts}  # type: ignore[attr-defined]
    known |= {
        "--job",
        "--job-name",
        "--no-requeue",
        "--open-mode",
        "--signal",
        "--qos",
        "--mem",
        "--constraint",
        "--distribution",
        "--pty",
        "--gpus",
        "--gpus-per-node",
        "--gpus-per-task",
        "--export",
        "--rdzv-backend",
        "--cpu-bind",
        "--numa-binding",
    }  # Slurm's and torchrun's own.
    named = {option for page in PAGES for option in re.findall(r"--[a-z][a-z-]+", page.read_text())}
    assert named - known == set()


def test_the_public_surface() -> None:
    assert paceline.__all__ == ["AfterBackward", "Recipe", "Strategy", "Sync", "Workload", "attach"]
    for name in paceline.__all__:
        assert getattr(paceline, name).__doc__


def test_the_workload_of_the_documentation_can_be_made() -> None:
    (code,) = re.findall(r"```python\n(# my_module.py.*?)```", (ROOT / "docs" / "own-code.md").read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert isinstance(scope["make_workload"](), paceline.Workload)


def test_the_strategy_of_the_documentation_is_one() -> None:
    (code,) = re.findall(r"```python\n(# my_schemes.py.*?)```", (ROOT / "docs" / "own-code.md").read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert issubclass(scope["Scaled"], paceline.Strategy)
    assert scope["Scaled"]().name == "scaled"


def test_checkpoints_are_read_as_the_documentation_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = torch.nn.Linear(3, 2)
    folder = CheckpointFolder(Path("runs/my-run/checkpoints"))
    folder.write(State(model=trained.state_dict(), optimizer={}, per_rank={}), [], info(1200))
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    examples = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "runs/my-run" in code]
    assert len(examples) == 2
    for code in examples:
        model = torch.nn.Linear(3, 2)
        exec(code, {"model": model})
        assert torch.equal(model.weight, trained.weight)
