"""Registry of strategies: name, one-line summary, role, sets, class and plan of each. Does not import torch."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.fields import field_docs_of_source
from paceline.config.specs import Spec, build, split_list
from paceline.errors import UsageError, unknown_name
from paceline.plans import Plan
from paceline.user_code import check_module, import_module

if TYPE_CHECKING:
    from paceline.records.experiment.design import CandidateRole
    from paceline.strategies.base.strategy import Strategy


@dataclass(frozen=True)
class StrategyEntry:
    """Registry entry of a strategy."""

    name: str
    summary: str
    role: CandidateRole
    """Role in experiments, the same that the class has by its attributes."""
    sets: tuple[str, ...]
    """Named sets that it is a member of; `all` has every strategy."""
    strategy: str
    """Class of the strategy, as `module:Class`."""
    plan: str
    """Function that returns its plan, as `module:function`."""
    one_process: bool = False
    """Whether only one rank trains, the same that the class has by its roles."""


def _entry(
    name: str,
    summary: str,
    class_name: str,
    *,
    sets: str = "",
    role: CandidateRole = "candidate",
    plan: str | None = None,
    module: str | None = None,
    one_process: bool = False,
) -> StrategyEntry:
    """Return an entry whose module and plan are in the files of the strategy's name, unless given."""
    return StrategyEntry(
        name,
        summary,
        role,
        tuple(sets.split()),
        f"paceline.strategies.{module or name}:{class_name}",
        f"paceline.plans.{plan or f'{name}:plan'}",
        one_process,
    )


# Colours follow the order, so a new strategy at the end leaves the others their colours.
ENTRIES = {
    entry.name: entry
    for entry in (
        _entry(
            "single",
            "one process on the whole batch: the baseline",
            "Single",
            sets="usual classic fast",
            role="baseline",
            plan="classic:nothing",
            one_process=True,
        ),
        _entry(
            "none",
            "no synchronisation: the upper bound on speed",
            "NoSync",
            sets="usual classic fast",
            role="bound",
            plan="classic:nothing",
        ),
        _entry(
            "gather_scatter",
            "gather to rank 0, average, scatter back; per parameter, after backward",
            "GatherScatter",
            sets="usual classic",
            plan="classic:gather_scatter",
        ),
        _entry(
            "p2p",
            "as gather_scatter, with isend and irecv",
            "PointToPoint",
            sets="usual classic",
            plan="classic:p2p",
        ),
        _entry(
            "allreduce",
            "one blocking all_reduce per parameter, after backward",
            "AllReduce",
            sets="usual classic",
            plan="classic:allreduce",
        ),
        _entry(
            "ddp",
            "PyTorch's DistributedDataParallel: buckets, all-reduced during backward",
            "Ddp",
            sets="usual classic fast",
            plan="classic:ddp",
        ),
        _entry(
            "bucketed",
            "the algorithm of ddp in readable Python: buckets, all-reduced during backward",
            "Bucketed",
            sets="fast",
        ),
        _entry("ring", "one ring all-reduce of all gradients, written in Python, after backward", "Ring", sets="fast"),
        _entry(
            "halving_doubling",
            "one all-reduce by recursive halving and doubling (2 log2 p steps), after backward",
            "HalvingDoubling",
            sets="fast",
        ),
        _entry(
            "shared_memory",
            "ranks of one host sum gradients in shared memory; one rank per host joins a ring",
            "SharedMemory",
            sets="usual fast",
        ),
        _entry(
            "priority",
            "gradients of the first layers first; overlaps with backward and the next forward",
            "Priority",
            sets="usual fast",
            module="priority.strategy",
        ),
        _entry(
            "parameter_server",
            "servers keep the weights, workers send gradients; synchronous or asynchronous",
            "ParameterServer",
            sets="fast",
            module="parameter_server.strategy",
        ),
        _entry("tree", "one all-reduce along a binomial tree, to rank 0 and back, after backward", "Tree"),
        _entry(
            "data_parallel",
            "PyTorch's DataParallel: one process splits each batch over the GPUs of its host",
            "DataParallel",
            plan="classic:nothing",
            one_process=True,
        ),
    )
}

BASELINE_STRATEGIES = tuple(name for name, entry in ENTRIES.items() if entry.role == "baseline")
"""Strategies that train in one process, which the others are measured against."""

SETS = {
    **{
        name: tuple(entry.name for entry in ENTRIES.values() if name in entry.sets)
        for name in ("usual", "classic", "fast")
    },
    "all": tuple(ENTRIES),
}
"""Named sets of strategies: what `compare` measures by default, the classic ones, those that may be faster, and all."""


@dataclass(frozen=True)
class Option:
    """Option of a strategy, as declared in its source."""

    name: str
    kind: str
    default: str
    doc: str


@dataclass(frozen=True)
class Lesson:
    """Explanation of a strategy, read from its source."""

    name: str
    summary: str
    text: str
    options: tuple[Option, ...]


def find(name: str) -> StrategyEntry:
    """Return the entry of a registered strategy; raise a UsageError for an unknown name."""
    if name not in ENTRIES:
        raise unknown_name("strategy", name, ENTRIES)
    return ENTRIES[name]


def create(text: str, *, allow_unused: bool = False) -> Strategy:
    """Return a new strategy from `name`, `name:key=value,key=value` or, for a user's strategy, `module:Class`."""
    spec = Spec.parse(text)
    kind = _load(spec.name if ":" in spec.name else find(spec.name).strategy)
    strategy: Strategy = kind(build(kind.Options, spec.options, spec.name))
    strategy.allow_unused = allow_unused
    return strategy


def check_options(text: str) -> None:
    """Raise a UsageError for an option that a registered strategy does not have, without importing the strategy."""
    spec = Spec.parse(text)
    known = option_names(spec.name) if spec.name in ENTRIES else set(spec.options)
    for key in spec.options:
        if key not in known:
            raise unknown_name(f"{spec.name} option", key, known)


def option_names(name: str) -> set[str]:
    """Return the options of a registered strategy, without importing it; none for other names."""
    return {option.name for option in lesson(name).options} if name in ENTRIES else set()


def parse_list(text: str) -> list[str]:
    """Return the strategies of a list such as `a,b:x=1`, with each named set replaced by its members."""
    names = [member for item in split_list(text) for member in SETS.get(item, (item,))]
    if not names:
        raise UsageError(
            "no strategy was named.",
            hint=f"name one or more of {', '.join(ENTRIES)}, or a set: {', '.join(SETS)}",
        )
    return names


def selected_by_set(text: str, strategy: str) -> bool:
    """Return whether the list `text` contains a strategy only through a named set.

    Such a strategy is left out where it cannot run; one that was named itself is an error.
    """
    return strategy not in split_list(text)


def trains_in_one_process(text: str) -> bool:
    """Return whether a registered strategy trains in one process, without importing the strategy."""
    entry = ENTRIES.get(Spec.parse(text).name)
    return entry is not None and entry.one_process


def plan_of(text: str) -> Callable[..., Plan]:
    """Return the function that plans the traffic of a registered strategy."""
    module, _, function = find(Spec.parse(text).name).plan.partition(":")
    plan: Callable[..., Plan] = getattr(importlib.import_module(module), function)
    return plan


def lesson(name: str) -> Lesson:
    """Return the explanation of a registered strategy, without importing the strategy."""
    entry = find(name)
    module, _, class_name = entry.strategy.partition(":")
    source = importlib.util.find_spec(module)
    assert source is not None, f"{module} is in the registry but does not exist"
    assert source.origin is not None
    classes = [node for node in ast.parse(Path(source.origin).read_text()).body if isinstance(node, ast.ClassDef)]
    (definition,) = [node for node in classes if node.name == class_name]
    options = [node for node in classes if node.name.endswith("Options")]
    return Lesson(
        name=name,
        summary=entry.summary,
        text=inspect.cleandoc(ast.get_docstring(definition) or ""),
        options=tuple(option for node in options for option in _options(node)),
    )


def _options(definition: ast.ClassDef) -> list[Option]:
    docs = field_docs_of_source(definition)
    return [
        Option(node.target.id, ast.unparse(node.annotation), ast.unparse(node.value), docs.get(node.target.id, ""))
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    ]


def _load(path: str) -> Any:
    from paceline.strategies.base.strategy import Strategy

    module_name, _, class_name = path.partition(":")
    check_module(module_name)
    module = import_module(module_name)
    kind = getattr(module, class_name, None)
    if kind is None:
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise unknown_name(f"strategy in {module_name!r} named", class_name, classes)
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise UsageError(f"{path!r} is not a strategy.", hint="it must inherit from paceline.Strategy")
    if inspect.isabstract(kind):
        unwritten = ", ".join(sorted(kind.__abstractmethods__))
        raise UsageError(
            f"{path!r} is not complete: it does not implement {unwritten}.",
            hint="implement it; `docs/own-code.md` has an example",
        )
    return kind
