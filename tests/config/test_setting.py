"""Metadata of settings: consistent with each other, and the only place that says how a setting is treated."""

from __future__ import annotations

import ast
import inspect
import json
import math
import shutil
import subprocess
import sys
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.main import app
from paceline.config import EXAMINED_SETTINGS, BatchConfig, CompareConfig, LaunchConfig, RunConfig, ScaleConfig
from paceline.config.setting import (
    NOT_NEGATIVE,
    POSITIVE,
    Bound,
    Setting,
    check_values,
    metadata_of,
    option_name,
    select,
    setting,
)
from paceline.errors import UsageError

KINDS: tuple[Any, ...] = (RunConfig, LaunchConfig, CompareConfig, ScaleConfig, BatchConfig)
PACKAGE = Path(paceline.__file__).parent
EVERY = [pytest.param(kind, name, id=f"{kind.__name__}.{name}") for kind in KINDS for name in metadata_of(kind)]
"""Every setting, with the config class that it belongs to."""
OF_RUNS = ("fixed", "compared", "in_next_command", "script", "ends_run", "positional")
"""Metadata that concern runs, and have no effect in other configs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Small:
    """Config of a test."""

    size: int | None = setting(None, bound=POSITIVE)
    share: float = setting(0.5, bound=Bound("from 0 to 1", lambda value: 0 <= value <= 1), compared=False)
    free: float = 1.0
    place: str = setting("here", positional=True)

    def __post_init__(self) -> None:
        check_values(self)


def test_a_field_keeps_its_default_and_gets_metadata() -> None:
    assert Small() == Small(size=None, share=0.5, free=1.0, place="here")
    assert [field.default for field in fields(Small)] == [None, 0.5, 1.0, "here"]
    assert metadata_of(Small)["size"] == Setting(bound=POSITIVE)
    assert metadata_of(Small)["free"] == Setting()
    assert select(Small, lambda metadata: metadata.compared) == ("size", "free", "place")
    with pytest.raises(TypeError, match="bond"):
        setting(1, bond=POSITIVE)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"size": 0}, "--size is 0.", "it must be more than 0"),
        ({"share": 1.5}, "--share is 1.5.", "it must be from 0 to 1"),
        ({"share": math.nan}, "--share is nan.", "it must be from 0 to 1"),
        ({"free": math.inf}, "--free is inf.", "it must be a finite number"),
        ({"free": math.nan}, "--free is nan.", "it must be a finite number"),
    ],
)
def test_numbers_out_of_bounds_are_refused(values: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Small(**values)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_bounds_include_their_ends() -> None:
    assert Small(size=1, share=0).share == 0
    assert NOT_NEGATIVE.holds(0)
    assert not POSITIVE.holds(0)


@pytest.mark.parametrize("name", [field.name for field in fields(RunConfig) if "float" in str(field.type)])
def test_numbers_of_a_run_are_finite(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(RunConfig(), **{name: math.inf})
    assert caught.value.message == f"{option_name(RunConfig, name)} is inf."
    bound = metadata_of(RunConfig)[name].bound
    expected = "a finite number" if bound is None or bound.holds(math.inf) else bound.description
    assert caught.value.hint == f"it must be {expected}"


def test_names_on_the_command_line() -> None:
    assert option_name(RunConfig, "batch_per_rank") == "--batch-per-rank"
    assert option_name(RunConfig, "workload") == "WORKLOAD"


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_metadata_fit_the_field(kind: Any, name: str) -> None:
    metadata, hint = metadata_of(kind)[name], typing.get_type_hints(kind)[name]
    default = {field.name: field.default for field in fields(kind)}
    is_number = bool({int, float} & {hint, *typing.get_args(hint)})
    assert metadata.bound is None or is_number
    assert not metadata.numbers or hint is str
    if metadata.in_place_of:  # None for "not given": then the other one counts.
        assert default[name] is default[metadata.in_place_of] is None
    if metadata.ends_run:
        assert default[name] is None


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_metadata_do_not_contradict_each_other(kind: Any, name: str) -> None:
    metadata = metadata_of(kind)[name]
    if kind is not RunConfig:
        assert {part: getattr(metadata, part) for part in OF_RUNS} == {
            part: getattr(Setting(), part) for part in OF_RUNS
        }
    assert not metadata.unused_by or kind in (RunConfig, LaunchConfig), "it belongs to one command"
    if metadata.fixed:
        assert metadata.script in ("own", "same"), "varies with scripts, but not with workloads"
    if not metadata.in_next_command:
        assert metadata.script != "attach", "a suggested command would train in another way"


def test_commands_that_leave_settings_out_exist() -> None:
    commands = {info.name for info in app.registered_commands}
    used = {command for metadata in metadata_of(RunConfig).values() for command in metadata.unused_by}
    assert used
    assert used <= commands


def test_settings_that_override_arguments_of_attach() -> None:
    arguments = inspect.signature(paceline.attach).parameters
    names = select(RunConfig, lambda metadata: metadata.script == "attach")
    assert names
    assert set(names) <= arguments.keys()


def test_the_doctor_sets_the_length_of_its_run_itself() -> None:
    assert not set(EXAMINED_SETTINGS) & {"evaluate", *select(RunConfig, lambda metadata: metadata.ends_run)}


def test_one_argument_has_no_option() -> None:
    assert select(RunConfig, lambda metadata: metadata.positional) == ("workload",)


def test_no_module_lists_settings_by_name() -> None:
    """Three settings of a run in one tuple, list or set are such a list."""
    names = metadata_of(RunConfig).keys()
    lists = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                texts = [element.value for element in node.elts if isinstance(element, ast.Constant)]
                if len(texts) > 2 and names >= set(texts):
                    lists.append(f"{file.relative_to(PACKAGE)}:{node.lineno}: {texts}")
    assert lists == []


LOOK = """
import json, sys
from dataclasses import fields
from pathlib import Path
from paceline.analysis.record_set import NOT_COMPARED
from paceline.cli.main import run
from paceline.config import EXAMINED_SETTINGS, SCRIPT_SETTINGS, CompareConfig, LaunchConfig, RunConfig
from paceline.config.fields import read_toml
from paceline.experiments.candidates import make_candidates
from paceline.experiments.checks import settings_of
from paceline.launch.launcher_process import Shape
from paceline.report.verdict.next_command import OMITTED_SETTINGS

for command in ("train", "compare", "scale", "batch", "doctor"):
    run([command, "--help"])
    print("=" * 9)
Path("new.toml").write_text("warm_up = 7")
compared = make_candidates(RunConfig(), CompareConfig(vary=("warm_up=1,2",)), Shape(1, 2))
print(json.dumps({
    "file": read_toml(Path("new.toml"), RunConfig),
    "varied": [one.config.warm_up for one in compared],
    "equal_on_hosts": settings_of("train", LaunchConfig(), RunConfig())["warm_up"],
    "examined": "warm_up" in EXAMINED_SETTINGS,
    "with_scripts": "warm_up" in SCRIPT_SETTINGS,
    "compared": "warm_up" not in NOT_COMPARED,
    "in_next_command": "warm_up" not in OMITTED_SETTINGS,
}))
"""


def test_a_new_setting_is_one_field(tmp_path: Path) -> None:
    """A copy of the package with one more field in `RunConfig`, and no other change."""
    shutil.copytree(PACKAGE, tmp_path / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "paceline" / "config" / "run.py"
    first = '    workload: str = setting("cnn"'
    text = source.read_text()
    assert text.count(first) == 1
    source.write_text(text.replace(first, f'    warm_up: int = 5\n    """Steps of warm-up."""\n{first}'))
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *helps, found = done.stdout.split("=" * 9)
    assert len(helps) == 5
    for text in helps:
        assert "--warm-up" in text
        assert "Steps of warm-up. [default: 5]" in " ".join(text.split())
    assert json.loads(found) == {
        "file": {"warm_up": 7},
        "varied": [1, 2],
        "equal_on_hosts": 5,
        "examined": True,
        "with_scripts": False,
        "compared": True,
        "in_next_command": True,
    }
