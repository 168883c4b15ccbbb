"""`Setting`: metadata of a config field, from which commands, comparisons, reports and checks know how to treat it.

    steps: int | None = setting(None, bound=POSITIVE, script="same", unused_by=("doctor",))

No other module lists settings by name. A field with a plain default has the metadata `Setting()`: `--vary` accepts it,
runs that differ in it are different candidates, suggested commands repeat it, and every command has it as an option.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from paceline.errors import UsageError, wrong_choice

CommandName = Literal["compare", "scale", "batch", "large-batch", "race", "doctor"]
"""Commands that use only some settings of a run; `train` uses all."""
ScriptUse = Literal["own", "same", "varied", "attach"]
WorkloadPart = Literal["train", "optimizer", "scheduler"]
"""Parts of a user's workload that take the place of settings; names of fields of `Workload`."""
MetadataT = ParamSpec("MetadataT")
DefaultT = TypeVar("DefaultT")
METADATA_KEY = "setting"


@dataclass(frozen=True, slots=True)
class Bound:
    """Range of a number."""

    description: str
    """Completes the sentence "it must be …"."""
    holds: Callable[[float], bool]


POSITIVE = Bound("more than 0", lambda value: value > 0)
NOT_NEGATIVE = Bound("0 or more", lambda value: value >= 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Metadata of a config field."""

    bound: Bound | None = None
    """Range of its values; None for any number."""
    fixed: str = ""
    """Reason why `--vary` refuses it, as a hint; empty if it may vary between candidates."""
    compared: bool = True
    """Whether runs that differ in it are different candidates. The strategy is not, since it names the candidate."""
    in_next_command: bool = True
    """Whether the next command that a report suggests repeats it: yes if it belongs to training, no if it only sets
    what is measured, for how long, and under which conditions."""
    script: ScriptUse = "own"
    """Use with `--script`. own: the script sets it itself, so that the option is refused. same: applies to all runs of
    the script. varied: may also vary between runs. attach: may vary, and overrides an argument of `paceline.attach`."""
    unused_by: tuple[CommandName, ...] = ()
    """Commands without a use for it."""
    per_host: bool = False
    """Whether it may differ between the hosts of a launch."""
    set_by_leader: bool = False
    """Whether the leader of a launch may give single runs another value than the command line does, as it does the seed
    of each repeat. Followers refuse a run in which any other setting differs from their own command."""
    may_change: bool = False
    """Whether an unfinished experiment may go on with another value: it changes nothing that is measured."""
    ends_run: bool = False
    """Whether it sets the length of a run."""
    positional: bool = False
    """Whether it is an argument on the command line, not an option."""
    in_place_of: str = ""
    """Setting of the same config that this one gives in another way; giving one clears the other."""
    replaced_by: WorkloadPart | None = None
    """Part of a user's workload that takes its place, so that it has no effect if the workload has that part."""
    needs: str = ""
    """Setting of a run without which it has no effect."""
    numbers: bool = False
    """Whether its text is a list of numbers, as in 1,2,4; a TOML file may then hold a number or a list."""


def _field_with(
    make_metadata: Callable[MetadataT, Setting],
) -> Callable[Concatenate[DefaultT, MetadataT], DefaultT]:
    """Return a function that makes a dataclass field from a default and the arguments of `make_metadata`."""

    def make_field(default: DefaultT, /, *args: MetadataT.args, **metadata: MetadataT.kwargs) -> DefaultT:
        made: DefaultT = field(default=default, metadata={METADATA_KEY: make_metadata(*args, **metadata)})
        return made

    return make_field


setting = _field_with(Setting)
"""Make a config field: its default value, then the arguments of `Setting`."""


def metadata_of(kind: type) -> Mapping[str, Setting]:
    """Return the metadata of all fields of a config class, by name."""
    return _cached_metadata_of(kind)


@functools.cache
def _cached_metadata_of(kind: type) -> Mapping[str, Setting]:
    plain = Setting()
    return {own.name: own.metadata.get(METADATA_KEY, plain) for own in fields(kind)}


def select(kind: type, condition: Callable[[Setting], bool]) -> tuple[str, ...]:
    """Return the names of the fields whose metadata meet a condition, in the order of the class."""
    return tuple(name for name, metadata in metadata_of(kind).items() if condition(metadata))


def option_name(kind: type, name: str) -> str:
    """Return a field's name on the command line, as in `--batch-per-rank` or `WORKLOAD`."""
    return name.upper() if metadata_of(kind)[name].positional else f"--{name.replace('_', '-')}"


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself; `X | None` of a `Literal` is a `typing.Union`."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def check_values(config: object) -> None:
    """Raise for a value that is not in a field's `Literal`, for a number out of its bound, and for one not finite."""
    kind = type(config)
    for name, hint in typing.get_type_hints(kind).items():
        value = getattr(config, name)
        choices = _choices(hint)
        if choices and value is not None and value not in choices:
            raise wrong_choice(option_name(kind, name), str(value), choices)
    for name, metadata in metadata_of(kind).items():
        value, bound = getattr(config, name), metadata.bound
        if bound is not None and value is not None and not bound.holds(value):
            raise _out_of_bounds(kind, name, value, bound.description)
        if isinstance(value, float) and not math.isfinite(value):
            raise _out_of_bounds(kind, name, value, "a finite number")


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the values of a `Literal`, or of one that may be None; empty for other types."""
    return next((typing.get_args(one) for one in union_members(hint) if typing.get_origin(one) is Literal), ())


def _out_of_bounds(kind: type, name: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"{option_name(kind, name)} is {value}.", hint=f"it must be {expected}")
