"""Registry: every strategy loads under its name, has an explanation and a plan; user strategies; no import of torch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import UsageError, WorkloadError
from paceline.experiments.candidates import role_of
from paceline.plans import Gradient, Plan
from paceline.strategies.base.strategy import Role, Strategy, uses_one_rank
from paceline.strategies.registry import (
    ENTRIES,
    SETS,
    create,
    find,
    lesson,
    parse_list,
    plan_of,
    trains_in_one_process,
)

HEADINGS = ["Idea", "Who sends what to whom", "Cost", "When to use it", "When not to use it"]


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_loads_under_its_name(name: str) -> None:
    strategy = create(name)
    assert isinstance(strategy, Strategy)
    assert strategy.name == name == ENTRIES[name].name
    assert ENTRIES[name].summary
    assert isinstance(strategy.options, type(strategy).Options)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_has_a_plan(name: str) -> None:
    plan = plan_of(f"{name}")([Gradient("a", 10), Gradient("b", 20)], 4)
    assert isinstance(plan, Plan)
    assert bool(plan.operations) == (ENTRIES[name].role == "candidate" and not ENTRIES[name].one_process)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_role_is_that_of_the_class(name: str) -> None:
    assert ENTRIES[name].role == role_of(create(name), 3)
    assert trains_in_one_process(name) == uses_one_rank(create(name), 3)


def test_options_and_user_strategies_have_a_role_too() -> None:
    assert not trains_in_one_process("ddp:bucket_mb=1")
    assert not trains_in_one_process("my_module:Mine:x=1")


@pytest.mark.parametrize("name", ENTRIES)
def test_every_lesson_has_all_headings(name: str) -> None:
    text = lesson(name).text
    lines = text.splitlines()
    assert not lines[0].startswith(" ")
    positions = [next((i for i, line in enumerate(lines) if line.startswith(heading)), -1) for heading in HEADINGS]
    assert -1 not in positions, dict(zip(HEADINGS, positions, strict=True))
    assert positions == sorted(positions)
    for position in positions:
        assert lines[position + 1].startswith("    "), f"{lines[position]} has nothing below it"


@pytest.mark.parametrize("name", ENTRIES)
def test_the_lesson_is_the_docstring_of_the_class(name: str) -> None:
    explained = lesson(name)
    assert explained.text == inspect.getdoc(type(create(name)))
    assert (explained.name, explained.summary) == (name, ENTRIES[name].summary)


@pytest.mark.parametrize("name", ENTRIES)
def test_options_are_listed_as_the_dataclass_has_them(name: str) -> None:
    fields = dataclasses.fields(type(create(name)).Options)
    listed = lesson(name).options
    assert [option.name for option in listed] == [field.name for field in fields]
    assert [ast.literal_eval(option.default) for option in listed] == [field.default for field in fields]
    assert all(option.doc and option.kind for option in listed)


def test_the_options_of_ddp() -> None:
    options = {option.name: option for option in lesson("ddp").options}
    assert options.keys() == {"bucket_mb", "overlap", "bucket_view", "static_graph"}
    assert (options["bucket_mb"].kind, options["bucket_mb"].default) == ("float", "25.0")
    assert "MiB" in options["bucket_mb"].doc
    assert (options["overlap"].kind, options["overlap"].default) == ("bool", "True")


def test_options_reach_the_strategy() -> None:
    ddp = create("ddp:bucket_mb=1.5,overlap=no")
    assert (ddp.options.bucket_mb, ddp.options.overlap, ddp.options.bucket_view) == (1.5, False, False)
    assert not ddp.allow_unused
    assert create("ddp", allow_unused=True).allow_unused


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("dpd", "there is no strategy 'dpd'", "did you mean 'ddp'?"),
        ("gather", "there is no strategy 'gather'", "did you mean 'gather_scatter'?"),
        ("ddp:bucket=1", "there is no ddp option 'bucket'", "did you mean 'bucket_mb'?"),
        ("ddp:bucket_mb=big", "ddp:bucket_mb='big' is not valid", "it takes a number"),
        ("ddp:bucket_mb=0", "ddp:bucket_mb is 0.0", "it must be more than 0"),
        ("ddp:overlap=2", "ddp:overlap='2' is not valid", "it takes true or false"),
    ],
)
def test_what_is_not_known(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        create(text)
    assert hint in (caught.value.hint or "")


def test_a_strategy_without_options_takes_none() -> None:
    with pytest.raises(UsageError, match="allreduce takes no options, but a=1 was given"):
        create("allreduce:a=1")


def test_find_and_lesson_and_plan_refuse_an_unknown_name() -> None:
    for function in (find, lesson, plan_of):
        with pytest.raises(UsageError, match="there is no strategy 'dpd'"):
            function("dpd")


def test_only_strategies_of_one_process_have_idle_ranks() -> None:
    for name, entry in ENTRIES.items():
        workers = create(name).roles(3).count(Role.WORKER)
        assert workers == (1 if entry.one_process else 3)
        assert entry.one_process or entry.role != "baseline"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("ddp", ["ddp"]),
        ("ddp, p2p", ["ddp", "p2p"]),
        ("ddp:bucket_mb=1,overlap=no,p2p", ["ddp:bucket_mb=1,overlap=no", "p2p"]),
        ("usual", list(SETS["usual"])),
        ("all", list(ENTRIES)),
        ("ddp:bucket_mb=1,classic", ["ddp:bucket_mb=1", *SETS["classic"]]),
        ("m:C:x=1,ddp", ["m:C:x=1", "ddp"]),
    ],
)
def test_parse_list(text: str, names: list[str]) -> None:
    assert parse_list(text) == names


@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no strategy was named") as caught:
        parse_list(text)
    assert "ddp" in (caught.value.hint or "")
    assert "classic" in (caught.value.hint or "")


def test_sets_have_the_strategies_that_declare_them() -> None:
    for name, entry in ENTRIES.items():
        assert {text for text, members in SETS.items() if name in members} == {*entry.sets, "all"}
    assert not SETS.keys() & ENTRIES.keys()
    assert set(SETS["classic"]) < set(SETS["usual"])
    assert {"single", "none", "ddp"} <= set.intersection(*map(set, SETS.values())), "needed to judge any other"


OWN = """
from dataclasses import dataclass
from paceline import AfterBackward

@dataclass(frozen=True)
class MineOptions:
    rank: int = 2
    '''Rank of the approximation.'''

class Mine(AfterBackward):
    name = "mine"
    Options = MineOptions

    def agree(self, gradients):
        pass

not_a_class = 3
class NotAStrategy:
    pass
"""


@pytest.fixture
def own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], str]]:
    """Return a function that writes a user module, with a unique name, into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "strategy_" + "".join(c if c.isalnum() else "_" for c in request.node.name)

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    yield write
    sys.modules.pop(name, None)


def test_a_user_strategy(own: Callable[[str], str]) -> None:
    module = own(OWN)
    assert create(f"{module}:Mine").options.rank == 2
    mine = create(f"{module}:Mine:rank=4")
    assert mine.options.rank == 4
    assert mine.name == "mine"
    assert isinstance(mine, Strategy)


def test_options_of_a_user_strategy_are_checked(own: Callable[[str], str]) -> None:
    module = own(OWN)
    with pytest.raises(UsageError, match=f"there is no {module}:Mine option 'rnk'") as caught:
        create(f"{module}:Mine:rnk=4")
    assert "did you mean 'rank'?" in (caught.value.hint or "")


def test_an_unknown_class_suggests_the_nearest(own: Callable[[str], str]) -> None:
    module = own(OWN)
    with pytest.raises(UsageError, match=f"there is no strategy in '{module}' named 'Mne'") as caught:
        create(f"{module}:Mne")
    assert "did you mean 'Mine'?" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["NotAStrategy", "not_a_class"])
def test_other_objects_are_refused(own: Callable[[str], str], name: str) -> None:
    module = own(OWN)
    with pytest.raises(UsageError, match=f"'{module}:{name}' is not a strategy") as caught:
        create(f"{module}:{name}")
    assert "paceline.Strategy" in (caught.value.hint or "")


def test_a_missing_module(own: Callable[[str], str]) -> None:
    own(OWN)
    with pytest.raises(UsageError, match="there is no module 'nowhere_to_be_found' in "):
        create("nowhere_to_be_found:Mine")


READ_WITHOUT_TORCH = """
import json, sys
sys.path.insert(0, "")
from paceline.strategies import registry
lessons = [registry.lesson(name).text for name in registry.ENTRIES]
plans = [registry.plan_of(name)([], 2) for name in registry.ENTRIES]
print(json.dumps([len(lessons), len(plans), "torch" in sys.modules]))
"""


def test_lessons_and_plans_need_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", READ_WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [len(ENTRIES), len(ENTRIES), False]


def test_an_incomplete_user_strategy_names_the_missing_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_done.py").write_text("import paceline\nclass Half(paceline.AfterBackward):\n    name = 'half'\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="'half_done:Half' is not complete: it does not implement agree"):
        create("half_done:Half")


def test_a_failing_user_module_shows_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_early.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError, match="importing 'fails_early' failed: ZeroDivisionError") as caught:
        create("fails_early:Any")
    assert "fails_early.py" in (caught.value.detail or "")
