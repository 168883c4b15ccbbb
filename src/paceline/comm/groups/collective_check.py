"""Check of collectives (`--check-collectives`): ranks compare what they are about to call, through the job's store.

Each rank appends a record of its call to a list in the store before the call runs, and compares it with the records
that are there. It never waits for other ranks, so that it can neither hang nor change the order of operations. The
last rank to arrive sees the records of all others. If they differ, it raises before its call runs, so that no byte of
it is sent; a collective cannot end without it.

The check has its own connection to the store. Messages between two ranks have a list for each pair and direction.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict

import msgspec
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.comm.stores.side_connection import connect_to_store_of_world, signer_of_world
from paceline.errors import RankError
from paceline.formatting import plural
from paceline.signing import Signer

MISMATCH_HINT = "call the same collectives on all ranks, in the same order, with tensors of the same size and dtype"
MOST_UNMATCHED = 1000
"""Calls of which the store keeps a record while others have not made theirs."""
_SHOWN_TENSORS = 3
_SEPARATOR = "\n"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Call of an operation by one rank."""

    rank: int
    kind: str
    shapes: list[list[int]]
    dtypes: list[str]
    detail: str
    """Root or reduction, in words; empty if there is neither."""
    place: str
    """Line that called it, as file.py:12."""
    step: int | None = None

    @property
    def elements(self) -> list[int]:
        """Number of elements of each tensor."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    def matches(self, other: Call) -> bool:
        """Return whether both call the same collective. Shapes may differ if the numbers of elements do not."""
        return (self.kind, self.detail) == (other.kind, other.detail) and self.has_same_tensors(other)

    def has_same_tensors(self, other: Call) -> bool:
        """Return whether both pass tensors with the same numbers of elements and dtypes."""
        return (self.dtypes, self.elements) == (other.dtypes, other.elements)

    def in_words(self) -> str:
        """Return the call in words."""
        tensors = [
            f"{dtype} {'×'.join(map(str, shape)) or 'scalar'}"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        if len(tensors) > _SHOWN_TENSORS:
            tensors[_SHOWN_TENSORS:] = [f"{plural(len(tensors) - _SHOWN_TENSORS, 'more tensor')}"]
        inside = ", ".join([*tensors, *([self.detail] if self.detail else [])])
        return f"rank {self.rank} called {self.kind}{f' ({inside})' if inside else ''} at {self.place}"


class CollectiveCheck:
    """Check of the calls of this rank on all groups of a run."""

    def __init__(self, store: Store, number: int, signer: Signer | None = None) -> None:
        """`store` is a connection to the store of the job that nothing else uses; `signer` signs the records.

        The number tells the check from others in the same store: records of one do not fit another.
        """
        self._store = PrefixStore(f"paceline-check-{number}", store)
        self._signer = (signer or Signer(b"")).derive("collectives", str(number))
        self._lock = threading.Lock()
        self._counts: defaultdict[str, int] = defaultdict(int)

    def collective(self, group: str, members: int, own: Call) -> None:
        """Compare a call with those of the other members of a group; raise `RankError` if they differ."""
        number, calls = self._exchange(group, members, own)
        other = next((call for call in calls if not own.matches(call)), None)
        if other is not None:
            raise _mismatch(own, other, f"collective {number + 1} of the group")

    def message(self, group: str, sender: int, receiver: int, tag: int, own: Call) -> None:
        """Compare a message with the call on the other side, if that was made; raise `RankError` if they differ."""
        number, calls = self._exchange(f"{group}/{sender}-{receiver}/{tag}", 2, own)
        other = next((call for call in calls if not own.has_same_tensors(call)), None)
        if other is not None:
            raise _mismatch(own, other, f"message {number + 1} from rank {sender} to rank {receiver}")

    def _exchange(self, name: str, expected: int, own: Call) -> tuple[int, list[Call]]:
        """Add a call to the next list of a name; return the number of the list, from 0, and its calls so far."""
        with self._lock:
            number = self._counts[name]
            self._counts[name] += 1
            key = f"{name}/{number}"
            line = self._signer.sign(key, msgspec.json.encode(own)).hex() + _SEPARATOR
            self._store.append(key, line)  # type: ignore[attr-defined]
            found = self._store.get(key).decode("ascii", "replace")
        calls = [call for line in found.split(_SEPARATOR) if (call := self._verified(key, line)) is not None]
        if len(calls) == expected and number:  # Every rank that has added to this list has read the one before it.
            self._store.delete_key(f"{name}/{number - 1}")
        elif number >= MOST_UNMATCHED:  # The other side may receive from any sender, which is not compared.
            self._store.delete_key(f"{name}/{number - MOST_UNMATCHED}")
        return number, calls

    def _verified(self, key: str, line: str) -> Call | None:
        """Return the call in a line of a list; None if no rank has written it."""
        try:
            content = self._signer.verify(key, bytes.fromhex(line))
            return None if content is None else msgspec.json.decode(content, type=Call)
        except (ValueError, msgspec.MsgspecError):  # Not hexadecimal, or no call.
            return None


_opened = itertools.count()
"""Numbers of the checks that this process has opened, the same on all ranks."""


def open_check() -> CollectiveCheck:
    """Return a check with a new connection to the store of the world; every rank calls this."""
    return CollectiveCheck(connect_to_store_of_world(), next(_opened), signer_of_world())


def _mismatch(own: Call, other: Call, what: str) -> RankError:
    first, second = sorted((own, other), key=lambda call: call.rank)
    when = "" if own.step is None else f"step {own.step}: "
    return RankError(f"{when}{first.in_words()}, but {second.in_words()} ({what}).", hint=MISMATCH_HINT)
