"""A parser to fuzz, and the property that it must have: a valid value or a clear error, in bounded time and memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from paceline.errors import PacelineError

LONGEST_S = 10.0
"""Longest CPU time of one input, which takes milliseconds; one that waits forever runs into the test's time-out."""
LONGEST_MESSAGE = 50_000
"""Most characters of an error message, whatever the length of the input: those that `printable` leaves, escaped."""
MOST_BYTES = 512 << 20
"""Memory by which a parser may exceed what the process has used before."""


@dataclass(frozen=True)
class Prepared:
    """A parser with valid inputs."""

    seeds: Sequence[Any]
    """Valid inputs, text or bytes; each must be parsed without an error."""
    parse: Callable[[Any], object]
    """Parse an input. Round trips are checked inside, by `assert`."""


@dataclass(frozen=True)
class Parser:
    """A parser of outside input."""

    name: str
    prepare: Callable[[Path], Prepared]
    """Function that makes the valid inputs, in an empty folder."""
    change: Callable[[Any, Sequence[Any], Random], Any]
    place: str = ""
    """Text that each error message must contain: the option, or the file; empty where the input has no name."""
    error: type[Exception] | tuple[type[Exception], ...] = PacelineError
    """Documented error. If it is not one of Paceline's, its message is a part of one."""
    weight: int = 10
    """Share of the examples of `make soak`, relative to that of other parsers; slow ones have less."""
    slow: bool = False
    """Whether an example takes more than 3 ms, so that `make test` has fewer of it."""


def check_seeds(prepared: Prepared) -> None:
    """Parse the valid inputs: a parser that refuses everything would pass all other checks."""
    for seed in prepared.seeds:
        prepared.parse(seed)


def check_example(parser: Parser, prepared: Prepared, random: Random) -> bool:
    """Parse one damaged input, and check the outcome; return whether it was refused."""
    damaged = parser.change(random.choice(prepared.seeds), prepared.seeds, random)
    started = time.process_time()
    try:
        prepared.parse(damaged)
        refused = False
    except parser.error as error:
        refused = True
        check_message(error, parser.place)
    elapsed_s = time.process_time() - started
    assert elapsed_s < LONGEST_S, f"the input took {elapsed_s:.1f} s of CPU time"
    return refused


def check_message(error: Exception, place: str) -> None:
    """Check that an error is one printable line of bounded length, which names the place."""
    message = error.message if isinstance(error, PacelineError) else str(error)
    assert message.strip(), "the message is empty"
    assert message.isprintable(), f"the message is not one printable line: {message[:300]!r}"
    assert len(message) <= LONGEST_MESSAGE, f"the message has {len(message)} characters: {message[:300]!r}"
    hint = getattr(error, "hint", None) or ""
    assert place in f"{message} {hint}", f"the message does not name {place!r}: {message[:300]!r}"
    assert hint == "" or (hint.isprintable() and len(hint) <= LONGEST_MESSAGE), f"the hint is {hint[:300]!r}"


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
