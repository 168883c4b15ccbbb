"""The transfers that each collective operation is made of, as Gloo carries it out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from paceline.plans.framing import Cut
from paceline.plans.plan import Gradient, Operation, Transfer


def all_reduce(items: int, item_bytes: int, ranks: int, earliest_s: float) -> Operation:
    """A ring: every rank passes n−1 chunks on while reducing and n−1 while gathering, each about 1/n of the tensor."""
    transfers = [] if ranks == 1 else list(_ring(Cut.evenly(items, item_bytes, ranks), ranks))
    return Operation("all_reduce", "ring", items * item_bytes, tuple(transfers), earliest_s)


def _ring(cut: Cut, ranks: int) -> Iterator[Transfer]:
    """Chunks go round to lower ranks: in 2(n−1) rounds a rank sends each of them twice, but for two."""
    _, all_messages = cut.of(0, ranks * cut.segments_per_rank)
    for rank in range(ranks):
        # Its own, which comes to it to be summed up last, and that of the rank which it sends to, for the same reason.
        (own, own_messages), (next_one, next_messages) = cut.chunk(rank), cut.chunk((rank - 1) % ranks)
        messages = 2 * all_messages - own_messages - next_messages
        if messages:
            yield Transfer(rank, (rank - 1) % ranks, 2 * cut.bytes - own - next_one, messages)


def gather(gradient: Gradient, ranks: int, earliest_s: float, kind: str = "gather") -> Operation:
    """Every other rank sends its whole tensor to rank 0."""
    transfers = tuple(Transfer(rank, 0, gradient.bytes) for rank in range(1, ranks))
    return Operation(kind, "direct", gradient.bytes * ranks, transfers, earliest_s)


def scatter(gradient: Gradient, ranks: int, earliest_s: float, kind: str = "scatter") -> Operation:
    """Rank 0 sends a whole tensor to every other rank."""
    transfers = tuple(Transfer(0, rank, gradient.bytes) for rank in range(1, ranks))
    return Operation(kind, "direct", gradient.bytes * ranks, transfers, earliest_s)


def broadcast(size: int, ranks: int, earliest_s: float = 0.0) -> Operation:
    """A binomial tree from rank 0: in round k the 2^k ranks that have it send it to 2^k that have not."""
    transfers, have = [], 1
    while have < ranks:
        transfers += [Transfer(rank, rank + have, size) for rank in range(have) if rank + have < ranks]
        have *= 2
    return Operation("broadcast", "tree", size, tuple(transfers), earliest_s)


def reduce(items: int, item_bytes: int, ranks: int, root: int) -> Operation:
    """The first half of a ring, after which every other rank sends the chunk that it has summed up to the root.

    With more than two segments a rank, Gloo goes round further than it has to: all but two segments.
    """
    cut, transfers = Cut.by_limit(items, item_bytes, ranks), list[Transfer]()
    _, all_messages = cut.of(0, ranks * cut.segments_per_rank)
    for rank in range(ranks if ranks > 1 else 0):
        kept, kept_messages = cut.of((rank + 1) * cut.segments_per_rank - 2, 2)
        transfers.append(Transfer(rank, (rank - 1) % ranks, cut.bytes - kept, all_messages - kept_messages))
        transfers += [Transfer(rank, root, cut.chunk(rank)[0])] if rank != root else []
    return Operation("reduce", "ring", items * item_bytes, tuple(t for t in transfers if t.bytes), 0.0)


def all_gather(size: int, ranks: int) -> Operation:
    """A ring to higher ranks: each passes on, in two messages, what every other has but the one that it goes to."""
    each = size // ranks
    transfers = tuple(Transfer(r, (r + 1) % ranks, each * (ranks - 1), 2 * (ranks - 1)) for r in range(ranks))
    return Operation("all_gather", "ring", size, transfers if ranks > 1 else (), 0.0)


def all_to_all(size: int, ranks: int) -> Operation:
    """Every rank sends every other its own part; `size` is that of all parts of one rank."""
    pairs = itertools.permutations(range(ranks), 2)
    return Operation("all_to_all", "direct", size, tuple(Transfer(a, b, size // ranks) for a, b in pairs), 0.0)


def barrier(ranks: int) -> Operation:
    """Empty messages to the ranks 1, 2, 4, … further on: after ⌈lg n⌉ rounds everyone has heard of everyone."""
    rounds = range((ranks - 1).bit_length())
    transfers = tuple(Transfer(rank, (rank + 2**k) % ranks, 0) for k in rounds for rank in range(ranks))
    return Operation("barrier", "dissemination", 0, transfers, 0.0)


@lru_cache(maxsize=4096)
def as_carried_out(kind: str, size: int, ranks: int, root: int) -> Operation | None:
    """A collective operation that was seen, as Gloo carries it out; None for one that is not known.

    `size` counts as in bandwidths: the tensor's, or that over all ranks for gather, scatter, all_gather and
    reduce_scatter. Items are taken to be of four bytes: it decides where a ring is cut, by a few bytes.
    """
    item_bytes = 4 if size % 4 == 0 else 1
    items, each = size // item_bytes, Gradient("", size // ranks, 1)
    known: dict[str, Callable[[], Operation]] = {
        "all_reduce": lambda: all_reduce(items, item_bytes, ranks, 0.0),
        "reduce_scatter": lambda: all_reduce(items, item_bytes, ranks, 0.0),  # Gloo makes it of an all_reduce.
        "broadcast": lambda: broadcast(size, ranks),
        "reduce": lambda: reduce(items, item_bytes, ranks, root),
        "gather": lambda: gather(each, ranks, 0.0),
        "scatter": lambda: scatter(each, ranks, 0.0),
        "all_gather": lambda: all_gather(size, ranks),
        "all_to_all": lambda: all_to_all(size, ranks),
        "barrier": lambda: barrier(ranks),
        "shared_reduce": lambda: Operation("shared_reduce", "memory", size, (), 0.0),
    }
    if kind not in known:
        return None
    operation = known[kind]()
    return operation if root <= 0 or kind == "reduce" else _from(root, operation, ranks)


def sent_by_rank(kind: str, size: int, ranks: int, root: int, rank: int) -> int:
    """The bytes that one rank sends in an operation that was seen, as Gloo carries it out.

    What is not known by a formula counts as sent in full by every rank but the root.
    """
    if kind in ("send", "recv"):
        return size if kind == "send" else 0
    operation = as_carried_out(kind, size, ranks, root)
    return size * (rank != root) if operation is None else _sent_in(operation, rank)


def _from(root: int, operation: Operation, ranks: int) -> Operation:
    """The same operation with another rank in the place of rank 0, and all others as far from it as before."""
    moved = [
        replace(transfer, source=(transfer.source + root) % ranks, target=(transfer.target + root) % ranks)
        for transfer in operation.transfers
    ]
    return replace(operation, transfers=tuple(moved))


def _sent_in(operation: Operation, rank: int) -> int:
    return sum(transfer.bytes for transfer in operation.transfers if transfer.source == rank)
