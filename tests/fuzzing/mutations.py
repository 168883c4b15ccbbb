"""Damaged inputs, made from valid ones by a `random.Random`: that of hypothesis, or in `make soak` a seeded one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

LONG_DIGITS = "9" * 5_000
"""More digits than Python converts to a number (sys.int_info.default_max_str_digits)."""
PIECES = (
    *("", " ", "\t", "\n", "\r\n", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff", "\u202e", "\ud800", "é", "😀"),
    *(
        "0",
        "-1",
        "007",
        "1_000",
        "²",
        "٣",
        "𝟗",
        "1e999",
        "1e-999",
        "nan",
        "-inf",
        "0x1f",
        LONG_DIGITS,
        f"0.{LONG_DIGITS}",
    ),
    *("true", "none", "null", "NaN", "{}", "[]", '""', "'", '"""', "\\", "\\ud800", "%s", "{0}", "$tensor", "../../x"),
    *(",", ":", "=", "@", "+", "-", ".", "#", "[" * 3_000, '{"a":' * 3_000, "x" * 20_000),
)
"""Text that parsers stumble over, wherever it is inserted."""
NUMBERS = (0, -1, 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 5e-324)
MOST_CHANGES = 3
_EDGES = (b"\0", b"\xff", b"\x80", b"\n", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80" * 8)


def change_text(text: str, others: Sequence[str], random: Random) -> str:
    """Return a text with up to three changes; `others` are texts of the same kind, from which parts are taken."""
    for _ in range(random.randint(1, MOST_CHANGES)):
        first, last = _range(len(text), random)
        kind = random.randrange(7)
        if kind == 0:
            text = text[:first] + text[last:]
        elif kind == 1:
            text = text[:first] + random.choice(PIECES) + text[first:]
        elif kind == 2:
            text = text[:first] + random.choice(PIECES) + text[last:]
        elif kind == 3:
            text = text[:last] + text[first:last] * random.choice((1, 2, 50)) + text[last:]
        elif kind == 4:
            other = random.choice(others)
            text = text[:first] + other[slice(*_range(len(other), random))] + text[last:]
        elif kind == 5:
            text = text[:first]
        else:
            text = (
                text[:first] + chr(random.choice((random.randrange(32, 127), random.randrange(0xD7FF)))) + text[last:]
            )
    return text


def change_bytes(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """Return bytes with up to three changes: flipped bits, bytes removed, repeated, overwritten or from `others`."""
    for _ in range(random.randint(1, MOST_CHANGES)):
        first, last = _range(len(content), random)
        kind = random.randrange(7)
        if kind <= 1 and content:
            place = min(first, len(content) - 1)
            content = content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
        elif kind == 2:
            content = content[:first] + content[last:]
        elif kind == 3:
            piece = random.choice((*_EDGES, random.choice(PIECES).encode(errors="surrogatepass")))
            content = content[:first] + piece + content[first + random.choice((0, len(piece))) :]
        elif kind == 4:
            content = content[:last] + content[first:last] * random.choice((1, 2, 50)) + content[last:]
        elif kind == 5:
            other = random.choice(others)
            content = content[:first] + other[slice(*_range(len(other), random))] + content[last:]
        else:
            content = content[:first]
    return content


def change_json(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """Return JSON with up to three values replaced, removed or renamed, or whose bytes have changed.

    Several lines are a JSON value each; one of them is changed.
    """
    if random.randrange(4) == 0:
        return change_bytes(content, others, random)
    lines = content.splitlines()
    number = random.randrange(len(lines)) if content.count(b"\n{") else None
    tree = json.loads(content if number is None else lines[number])
    for _ in range(random.randint(1, MOST_CHANGES)):
        tree = change_tree(tree, random)
    changed = json.dumps(tree).encode(errors="surrogatepass")
    return changed + b"\n" if number is None else b"\n".join([*lines[:number], changed, *lines[number + 1 :]]) + b"\n"


def change_tree(tree: Any, random: Random) -> Any:
    """Return a tree of JSON values with one change."""
    places = list(places_in(tree))
    if not places:
        return any_value(random)
    *path, last = random.choice(places)
    tree = inner = json.loads(json.dumps(tree))
    for key in path:
        inner = inner[key]
    kind = random.randrange(8)
    if kind == 0:
        del inner[last]
    elif kind == 1 and isinstance(inner, dict):
        inner[random.choice(PIECES)[:50]] = inner.pop(last)
    elif kind == 2:
        inner[last] = [inner[last]] * random.choice((1, 2, 30))
    elif kind == 3:
        inner[last] = _value_at(tree, random.choice(places))
    else:
        inner[last] = any_value(random)
    return tree


def places_in(tree: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of all values in a tree of JSON values."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield (*place, key)
        yield from places_in(value, (*place, key))


def any_value(random: Random, depth: int = 0) -> Any:
    """Return a JSON value that a schema may not expect. NaN and infinity become words that JSON does not have."""
    kind = random.randrange(9 if depth < 3 else 6)
    if kind <= 1:
        return random.choice((None, True, False, float("nan"), float("-inf")))
    if kind <= 3:
        return random.choice((*NUMBERS, random.randrange(-5, 20)))
    if kind <= 5:
        return random.choice(PIECES)
    if kind == 6:
        return [any_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 7:
        return {random.choice(PIECES)[:50]: any_value(random, depth + 1) for _ in range(random.randrange(3))}
    nested: Any = 0
    for _ in range(random.choice((5, 60, 300))):
        nested = [nested] if random.randrange(2) else {"a": nested}
    return nested


def _value_at(tree: Any, place: Sequence[str | int]) -> Any:
    """Return the value at a place of a tree that has changed; None if it has no such place any more."""
    try:
        for key in place:
            tree = tree[key]
    except (KeyError, IndexError, TypeError):
        return None
    return json.loads(json.dumps(tree))  # A copy, so that no value comes to contain itself.


def _range(length: int, random: Random) -> tuple[int, int]:
    """Return the bounds of a part, most of them short."""
    first = random.randint(0, length)
    return first, min(length, first + random.choice((0, 1, 1, 2, 8, length)))
