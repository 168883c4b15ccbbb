"""JSON text of the typed messages between launchers and ranks: jobs, and reports on how they ended.

Paths and arguments may contain bytes that are not valid UTF-8. The text is ASCII and restores them; msgspec's own
encoder and decoder refuse them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

MessageT = TypeVar("MessageT")


def to_text(message: Any, indent: int | None = None) -> str:
    """Return a message as JSON."""
    return json.dumps(msgspec.to_builtins(message, enc_hook=_from_path), indent=indent)


def from_text(text: str | bytes, kind: type[MessageT]) -> MessageT:
    """Return the message of a type from the JSON of `to_text`; raise a `ValueError` if it does not fit."""
    try:
        return msgspec.convert(json.loads(text), kind, str_keys=True, dec_hook=_to_path)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _from_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent in a message.")


def _to_path(kind: type[Any], value: Any) -> Path:
    if kind is Path:
        return Path(value)
    raise TypeError(f"{kind.__name__} cannot be received in a message.")
