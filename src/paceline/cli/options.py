"""Command-line options of a request: one for each setting of its configs, and for each further field.

Config dataclasses define the names, types, defaults and help texts of their settings.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from paceline.cli.requests import LaunchRequest, Request
from paceline.config.fields import TEXTS, field_docs, from_mapping, own_fields_first, owners, read_toml
from paceline.config.setting import metadata_of, union_members
from paceline.errors import UsageError

RequestType = TypeVar("RequestType", bound=Request)
OtherFields = Callable[[typer.Context], Mapping[str, Any]]
"""Returns the fields of a request that are no options, such as the arguments after `--`."""
CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
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


OPTIONAL_VALUES = {"--resume": "latest"}
"""Options whose value may be left out, with the value that they then have."""


def with_default_values(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line, with values for those of `OPTIONAL_VALUES` that another option follows."""
    words: list[str] = []
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        words.append(word)
        if word in OPTIONAL_VALUES and following.startswith("-"):
            words.append(OPTIONAL_VALUES[word])
    return words


def request_parser(
    request_type: type[RequestType], other_fields: OtherFields = lambda _: {}
) -> Callable[..., RequestType]:
    """Return a function that makes a request from the options of a command line; typer calls it with all of them.

    If several configs have a field of the same name, the option sets it in the first of them, and the configs of the
    command itself come before those that commands share. The others keep their default.
    """
    configs, own_options = _config_types(request_type), _own_options(request_type)
    owner = owners(*configs.values())
    settings_options = [
        _setting_option(config_type, field, request_type.help_texts, hidden=field.name in request_type.hidden)
        for config_type in configs.values()
        for field in own_fields_first(config_type)
        if field.name not in request_type.without and owner[field.name] is config_type
    ]
    alternatives = _alternatives(owner)
    parameters = [CONTEXT, *own_options, *settings_options, *([CONFIG_FILE] if configs else [])]

    def parse_options(*, context: typer.Context, config_file: Path | None = None, **given: Any) -> RequestType:
        on_command_line = {name: value for name, value in given.items() if value not in (None, [])}
        file = read_toml(config_file, *configs.values(), without=request_type.without) if config_file else {}
        settings = {name: value for name, value in file.items() if alternatives.get(name) not in on_command_line}
        settings |= on_command_line
        own = {parameter.name: given[parameter.name] for parameter in own_options}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        for name, config_type in configs.items():
            own_settings = {key: value for key, value in settings.items() if owner.get(key) is config_type}
            try:
                values[name] = from_mapping(config_type, own_settings)
            except UsageError as error:
                of_file = {key: value for key, value in own_settings.items() if key not in on_command_line}
                raise _naming_file(error, config_file, config_type, of_file) from None
        if issubclass(request_type, LaunchRequest):
            values["given"] = frozenset(settings)
        return request_type(**values, **other_fields(context))

    parse_options.__doc__ = request_type.__doc__
    parse_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    parse_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return parse_options


def _naming_file(
    error: UsageError, config_file: Path | None, config_type: type, settings: Mapping[str, Any]
) -> UsageError:
    """Return the error for settings that are refused; it names the TOML file if the file's settings alone cause it."""
    try:
        from_mapping(config_type, settings)
    except UsageError as other:
        if config_file is not None and other.message == error.message:
            return UsageError(f"{config_file} is refused: {error.message}", hint=error.hint)
    return error


def _alternatives(owner: Mapping[str, type]) -> dict[str, str]:
    """Return, by name, the setting that gives the same value in another way: one on the command line clears the other.

    Only the config that owns a setting counts: `scale` has a batch and a batch per rank, for two kinds of scaling.
    """
    found: dict[str, str] = {}
    for name, kind in owner.items():
        if other := metadata_of(kind)[name].in_place_of:
            found |= {name: other, other: name}
    return found


def _config_types(request_type: type[Request]) -> dict[str, type]:
    """Return the config types of a request by field name; those of the command itself come first."""
    hints, own = _type_hints(request_type), inspect.get_annotations(request_type)
    names = sorted((field.name for field in fields(request_type)), key=lambda name: name not in own)
    return {name: hints[name] for name in names if is_dataclass(hints[name]) and not issubclass(hints[name], Request)}


def _own_options(request_type: type[Request]) -> list[inspect.Parameter]:
    """Return the options that are fields of the request itself: those annotated with an option of typer."""
    hints = _type_hints(request_type)
    found = []
    for field in fields(request_type):
        if typing.get_origin(hints[field.name]) is Annotated:
            kind, option = typing.get_args(hints[field.name])
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            found.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[_repeatable(kind), option],
                )
            )
    return found


def _setting_option(
    config_type: type, field: Field[Any], help_texts: Mapping[str, str], *, hidden: bool
) -> inspect.Parameter:
    """Return the option of a setting. Its default is None: then the value of the TOML file or of the config applies."""
    help_text = help_texts.get(field.name) or field_docs(config_type)[field.name]
    default_is_empty = field.default in (None, "", ()) or field.default is False or field.default is MISSING
    if not default_is_empty and "[default" not in help_text:
        shown = "on" if field.default is True else field.default
        help_text += f" [default: {shown}]"
    make = typer.Argument if metadata_of(config_type)[field.name].positional else typer.Option
    option = make(help=help_text, show_default=False, hidden=hidden)
    option_type: Any = _option_type(_type_hints(config_type)[field.name])
    annotation = Annotated[option_type | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@functools.cache
def _type_hints(owner: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass; evaluating them takes 1 ms, which would add up in `--help`."""
    return typing.get_type_hints(owner, include_extras=True)


def _option_type(kind: Any) -> Any:
    """Return the type that typer parses. The config checks choices itself: its error suggests the nearest name."""
    if kind == TEXTS:
        return list[str]
    (kind,) = [member for member in union_members(kind) if member is not type(None)]
    return str if typing.get_origin(kind) is typing.Literal else kind


def _repeatable(kind: Any) -> Any:
    """Return the type that typer parses for a field of the request: a list in place of a tuple of any length."""
    return list[typing.get_args(kind)[0]] if typing.get_origin(kind) is tuple else kind  # type: ignore[misc]
