"""Command-line options from the fields of config dataclasses, which define names, types, defaults and help texts."""

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

from paceline.cli.emulation import run_or_emulate
from paceline.config import ALTERNATIVES
from paceline.config.fields import TEXTS, field_docs, from_mapping, owners, read_toml
from paceline.config.setting import metadata_of

ALTERNATIVE_OF = {one: other for pair in ALTERNATIVES for one, other in (pair, pair[::-1])}
CONFIG_FILE = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with settings; options on the command line take precedence."),
    ],
)


class PassThroughCommand(TyperCommand):
    """Command that stores the arguments after `--` in the context's `args`, for the user's script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, args[:end])
        ctx.args = args[end + 1 :]
        return args[end + 1 :]


@dataclass(frozen=True)
class Request:
    """Parsed and checked arguments of a command."""

    configs: tuple[Any, ...]
    own_options: Mapping[str, Any]
    """Options of the command that belong to no config, by parameter name."""


_parsed_requests: ContextVar[list[Request] | None] = ContextVar("parsed_requests", default=None)


@contextmanager
def parse_only() -> Iterator[list[Request]]:
    """Within the `with` block, commands parse and check their arguments but do not run; yield the list of requests."""
    requests: list[Request] = []
    token = _parsed_requests.set(requests)
    try:
        yield requests
    finally:
        _parsed_requests.reset(token)


def config_options(
    *config_types: type,
    without: frozenset[str] = frozenset(),
    hidden: frozenset[str] = frozenset(),
    help_texts: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with an option for each field of the config types.

    The command is called with one config of each type, in the given order. If several types have a field of the same
    name, the option sets it in the first of them; the others keep their default.

    Fields in `without` get no option. Fields in `hidden` get an option that `--help` does not show: the command ignores
    it, so that it accepts the settings of other commands. `help_texts` replaces the docstring of a field as help text.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        owner = owners(*config_types)
        own_parameters = [
            p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        added = [
            _option(config_type, field, help_texts or {}, hidden=field.name in hidden)
            for config_type in config_types
            for field in fields(config_type)
            if field.name not in without and owner[field.name] is config_type
        ]
        added.append(CONFIG_FILE)

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            file = given.pop(CONFIG_FILE.name)
            on_command_line = {name: value for name, value in given.items() if value not in (None, [])}
            settings = read_toml(file, *config_types, without=without) if file else {}
            settings = {
                name: value for name, value in settings.items() if ALTERNATIVE_OF.get(name) not in on_command_line
            } | on_command_line
            own_options = {parameter.name: given[parameter.name] for parameter in own_parameters}
            configs: list[Any] = [
                from_mapping(
                    config_type, {name: value for name, value in settings.items() if owner.get(name) is config_type}
                )
                for config_type in config_types
            ]
            requests = _parsed_requests.get()
            if requests is not None:
                requests.append(Request(tuple(configs), own_options))
                return None
            return run_or_emulate(configs, lambda *final_configs: command(*final_configs, **own_options))

        run.__signature__ = inspect.Signature([*own_parameters, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own_parameters, *added)}
        run.config_types = config_types  # type: ignore[attr-defined]
        return run

    return decorate


def _option(config_type: type, field: Field[Any], help_texts: Mapping[str, str], *, hidden: bool) -> inspect.Parameter:
    """Return the option of one field. Its default is None: then the value of the TOML file or of the config applies."""
    help_text = help_texts.get(field.name) or field_docs(config_type)[field.name]
    default_is_empty = field.default in (None, "", ()) or field.default is False or field.default is MISSING
    if not default_is_empty and "[default" not in help_text:
        shown = "on" if field.default is True else field.default
        help_text += f" [default: {shown}]"
    make = typer.Argument if metadata_of(config_type)[field.name].positional else typer.Option
    option = make(help=help_text, show_default=False, hidden=hidden)
    option_type: Any = _option_type(typing.get_type_hints(config_type)[field.name])
    annotation = Annotated[option_type | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option_type(kind: Any) -> Any:
    """Return the type that typer parses. The config checks choices itself: its error suggests the nearest name."""
    if kind == TEXTS:
        return list[str]
    if isinstance(kind, types.UnionType):
        (kind,) = [member for member in kind.__args__ if member is not type(None)]
    return str if typing.get_origin(kind) is typing.Literal else kind
