"""Makes command-line options of the fields of a config dataclass: one source for names, types, defaults and help."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from paceline.cli.emulation import on_hosts
from paceline.config import ALTERNATIVES
from paceline.config.fields import TEXTS, field_docs, from_mapping, owners, read_toml

OTHER_WAY = {one: other for pair in ALTERNATIVES for one, other in (pair, pair[::-1])}
POSITIONAL = frozenset({"workload"})
CONFIG_FILE = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None, typer.Option("--config", help="A TOML file of these settings; the command line wins over it.")
    ],
)


class PassThroughCommand(TyperCommand):
    """A command that leaves what follows `--` to a program of the user's own, in the context's `args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, args[:end])
        ctx.args = args[end + 1 :]
        return args[end + 1 :]


@dataclass(frozen=True)
class Request:
    """What a command was asked to do."""

    configs: tuple[Any, ...]
    rest: Mapping[str, Any]
    """Its own options, which belong to no config."""


_heard: ContextVar[list[Request] | None] = ContextVar("heard", default=None)


@contextmanager
def only_asked() -> Iterator[list[Request]]:
    """Commands that are called meanwhile check what they are asked to do, as always, but do not do it."""
    heard: list[Request] = []
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


def takes(
    *kinds: type,
    without: frozenset[str] = frozenset(),
    hidden: frozenset[str] = frozenset(),
    help_texts: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command an option per field of `kinds`; it is called with the configs built from them, in that order.

    A field that several have belongs to the first of them; the others keep its default.
    Fields named in `without` keep their defaults. Those in `hidden` mean nothing to this command, but are taken, so
    that it can be given another's settings. `help_texts` say what a field means to this command, where that is not
    what its docstring says.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        owner = owners(*kinds)
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
        added = [
            _option(kind, field, help_texts or {}, hidden=field.name in hidden)
            for kind in kinds
            for field in fields(kind)
            if field.name not in without and owner[field.name] is kind
        ]
        added.append(CONFIG_FILE)

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            file = given.pop(CONFIG_FILE.name)
            typed = {name: value for name, value in given.items() if value not in (None, [])}
            settings = read_toml(file, *kinds, without=without) if file else {}
            settings = {name: value for name, value in settings.items() if OTHER_WAY.get(name) not in typed} | typed
            rest = {parameter.name: given[parameter.name] for parameter in own}
            configs: list[Any] = [
                from_mapping(kind, {name: value for name, value in settings.items() if owner.get(name) is kind})
                for kind in kinds
            ]
            heard = _heard.get()
            if heard is not None:
                heard.append(Request(tuple(configs), rest))
                return None
            return on_hosts(configs, lambda *here: command(*here, **rest))

        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        run.kinds = kinds  # type: ignore[attr-defined]
        return run

    return decorate


def _option(kind: type, field: Field[Any], help_texts: Mapping[str, str], *, hidden: bool) -> inspect.Parameter:
    """The option of one field; its default is None, so that a TOML file can tell whether it was given."""
    help_text = help_texts.get(field.name) or field_docs(kind)[field.name]
    nothing = field.default in (None, "", ()) or field.default is False or field.default is MISSING
    if not nothing and "[default" not in help_text:
        shown = "on" if field.default is True else field.default
        help_text += f" [default: {shown}]"
    make = typer.Argument if field.name in POSITIONAL else typer.Option
    option = make(help=help_text, show_default=False, hidden=hidden)
    plain: Any = _plain(typing.get_type_hints(kind)[field.name])
    annotation = Annotated[plain | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _plain(kind: Any) -> Any:
    """The type that typer parses; choices are checked by the config itself, which knows the nearest name."""
    if kind == TEXTS:
        return list[str]
    if isinstance(kind, types.UnionType):
        (kind,) = [member for member in kind.__args__ if member is not type(None)]
    return str if typing.get_origin(kind) is typing.Literal else kind
