"""The strategies there are: name, one line, where its class is and where its plan is. Free of torch."""

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
    from paceline.strategies.base.strategy import Strategy


@dataclass(frozen=True)
class StrategyEntry:
    """Where to find a strategy."""

    name: str
    summary: str
    strategy: str
    """`module:Class`"""
    plan: str
    """`module:function`"""


def _entry(
    name: str, summary: str, class_name: str, plan: str | None = None, module: str | None = None
) -> StrategyEntry:
    """A strategy in the file of its name, as its plan is unless another place is said."""
    return StrategyEntry(
        name, summary, f"paceline.strategies.{module or name}:{class_name}", f"paceline.plans.{plan or f'{name}:plan'}"
    )


ENTRIES = {
    entry.name: entry
    for entry in (
        _entry("single", "one process, nothing to agree on: the baseline", "Single", "classic:nothing"),
        _entry("none", "no synchronisation at all: the bound no strategy can beat", "NoSync", "classic:nothing"),
        _entry(
            "gather_scatter",
            "gather to rank 0, mean, scatter back, per parameter",
            "GatherScatter",
            "classic:gather_scatter",
        ),
        _entry("p2p", "the same through rank 0 with isend and irecv", "PointToPoint", "classic:p2p"),
        _entry("allreduce", "a blocking all_reduce per parameter, after backward", "AllReduce", "classic:allreduce"),
        _entry("ddp", "PyTorch's DistributedDataParallel: buckets, overlapped with backward", "Ddp", "classic:ddp"),
        _entry("bucketed", "our own overlapped reducer: `ddp`, to be read", "Bucketed"),
        _entry("ring", "one all-reduce around a ring of our own, after backward", "Ring"),
        _entry("halving_doubling", "the same between partners, in 2 lg p steps", "HalvingDoubling"),
        _entry(
            "priority",
            "the first layers' gradients first, hidden behind the next forward too",
            "Priority",
            module="priority.strategy",
        ),
        _entry(
            "shared_memory", "ranks of a host add up in memory they share; leaders ring across hosts", "SharedMemory"
        ),
        _entry(
            "parameter_server",
            "servers keep the weights, workers send gradients, in step or not",
            "ParameterServer",
            module="parameter_server.strategy",
        ),
    )
}

_CLASSIC = ("single", "none", "gather_scatter", "p2p", "allreduce", "ddp")

SETS = {
    "usual": (*_CLASSIC, "shared_memory", "priority"),
    "classic": _CLASSIC,
    "fast": (
        "single",
        "none",
        "ddp",
        "bucketed",
        "ring",
        "halving_doubling",
        "shared_memory",
        "priority",
        "parameter_server",
    ),
    "all": tuple(ENTRIES),
}
"""Names for several strategies at once."""


@dataclass(frozen=True)
class Option:
    """One option of a strategy, as its source declares it."""

    name: str
    kind: str
    default: str
    doc: str


@dataclass(frozen=True)
class Lesson:
    """What a strategy's file teaches."""

    name: str
    summary: str
    text: str
    options: tuple[Option, ...]


def find(name: str) -> StrategyEntry:
    """The entry of a known strategy."""
    if name not in ENTRIES:
        raise unknown_name("strategy", name, ENTRIES)
    return ENTRIES[name]


def create(text: str, *, allow_unused: bool = False) -> Strategy:
    """Makes a strategy from `name`, `name:key=value` or, for the user's own, `module:Class`."""
    spec = Spec.parse(text)
    kind = _load(spec.name if ":" in spec.name else find(spec.name).strategy)
    strategy: Strategy = kind(build(kind.Options, spec.options, spec.name))
    strategy.allow_unused = allow_unused
    return strategy


def check_options(text: str) -> None:
    """Refuses an option that a known strategy does not have, read from its file without running it."""
    spec = Spec.parse(text)
    known = {option.name for option in lesson(spec.name).options} if spec.name in ENTRIES else set(spec.options)
    for key in spec.options:
        if key not in known:
            raise unknown_name(f"{spec.name} option", key, known)


def parse_list(text: str) -> list[str]:
    """The strategies of `a,b:x=1` or of a named set, as they were written."""
    names = [member for item in split_list(text) for member in SETS.get(item, (item,))]
    if not names:
        raise UsageError("no strategy was named.", hint=f"known: {', '.join(ENTRIES)}; sets: {', '.join(SETS)}")
    return names


def in_a_set(text: str, strategy: str) -> bool:
    """Whether a strategy of `text` was meant by a set alone: where it does not fit it is left out, not refused."""
    return strategy not in split_list(text)


def plan_of(text: str) -> Callable[..., Plan]:
    """The function that plans the traffic of a known strategy."""
    module, _, function = find(Spec.parse(text).name).plan.partition(":")
    plan: Callable[..., Plan] = getattr(importlib.import_module(module), function)
    return plan


def lesson(name: str) -> Lesson:
    """What the strategy's file says of itself, read without running it."""
    entry = find(name)
    module, _, class_name = entry.strategy.partition(":")
    source = importlib.util.find_spec(module)
    assert source is not None, f"{module} of the registry does not exist"
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
        raise UsageError(f"{path!r} is not a strategy.", hint="it has to inherit from paceline.Strategy")
    if inspect.isabstract(kind):
        unwritten = ", ".join(sorted(kind.__abstractmethods__))
        raise UsageError(f"{path!r} is not complete: it lacks {unwritten}.", hint="`docs/own-code.md` has an example")
    return kind
