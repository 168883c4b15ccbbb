"""Transfers between ranks of each collective operation, as implemented by Gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from paceline.plans.framing import RingSegments
from paceline.plans.plan import Gradient, Operation, Transfer


def all_reduce(items: int, item_bytes: int, ranks: int, earliest_s: float) -> Operation:
    """Return a ring all-reduce: each rank sends n−1 chunks to reduce and n−1 to gather, each 1/n of the size."""
    transfers = [] if ranks == 1 else list(_ring(RingSegments.of_all_reduce(items, item_bytes, ranks), ranks))
    return Operation("all_reduce", "ring", items * item_bytes, tuple(transfers), earliest_s)


def _ring(segments: RingSegments, ranks: int) -> Iterator[Transfer]:
    """Yield the transfers of a ring to lower ranks: in 2(n−1) rounds a rank sends all chunks twice, except two."""
    _, all_messages = segments.span(0, ranks * segments.segments_per_rank)
    for rank in range(ranks):
        # Two chunks are sent only once: its own, whose sum it completes, and that of the rank that it sends to.
        (own, own_messages), (next_one, next_messages) = segments.chunk(rank), segments.chunk((rank - 1) % ranks)
        messages = 2 * all_messages - own_messages - next_messages
        if messages:
            yield Transfer(rank, (rank - 1) % ranks, 2 * segments.bytes - own - next_one, messages)


def gather(gradient: Gradient, ranks: int, earliest_s: float, kind: str = "gather") -> Operation:
    """Return a gather: every other rank sends its whole tensor to rank 0."""
    transfers = tuple(Transfer(rank, 0, gradient.bytes) for rank in range(1, ranks))
    return Operation(kind, "direct", gradient.bytes * ranks, transfers, earliest_s)


def scatter(gradient: Gradient, ranks: int, earliest_s: float, kind: str = "scatter") -> Operation:
    """Return a scatter: rank 0 sends a whole tensor to every other rank."""
    transfers = tuple(Transfer(0, rank, gradient.bytes) for rank in range(1, ranks))
    return Operation(kind, "direct", gradient.bytes * ranks, transfers, earliest_s)


def broadcast(size: int, ranks: int, earliest_s: float = 0.0) -> Operation:
    """Return a broadcast by a binomial tree from rank 0: in round k, 2^k ranks send to 2^k others."""
    transfers, reached = [], 1
    while reached < ranks:
        transfers += [Transfer(rank, rank + reached, size) for rank in range(reached) if rank + reached < ranks]
        reached *= 2
    return Operation("broadcast", "tree", size, tuple(transfers), earliest_s)


def reduce(items: int, item_bytes: int, ranks: int, root: int) -> Operation:
    """Return a reduce: the first half of a ring, after which every other rank sends its summed chunk to the root.

    With more than two segments per rank, Gloo sends more than necessary around the ring: all but two segments.
    """
    segments, transfers = RingSegments.of_reduce(items, item_bytes, ranks), list[Transfer]()
    _, all_messages = segments.span(0, ranks * segments.segments_per_rank)
    for rank in range(ranks if ranks > 1 else 0):
        kept, kept_messages = segments.span((rank + 1) * segments.segments_per_rank - 2, 2)
        transfers.append(Transfer(rank, (rank - 1) % ranks, segments.bytes - kept, all_messages - kept_messages))
        transfers += [Transfer(rank, root, segments.chunk(rank)[0])] if rank != root else []
    return Operation("reduce", "ring", items * item_bytes, tuple(t for t in transfers if t.bytes), 0.0)


def all_gather(size: int, ranks: int) -> Operation:
    """Return an all-gather by a ring to higher ranks: n−1 rounds, each with one rank's part in two messages."""
    each = size // ranks
    transfers = tuple(Transfer(r, (r + 1) % ranks, each * (ranks - 1), 2 * (ranks - 1)) for r in range(ranks))
    return Operation("all_gather", "ring", size, transfers if ranks > 1 else (), 0.0)


def all_to_all(size: int, ranks: int) -> Operation:
    """Return an all-to-all: each rank sends each other rank its part; `size` is that of all parts of one rank."""
    pairs = itertools.permutations(range(ranks), 2)
    return Operation("all_to_all", "direct", size, tuple(Transfer(a, b, size // ranks) for a, b in pairs), 0.0)


def barrier(ranks: int) -> Operation:
    """Return a dissemination barrier: empty messages to the ranks 1, 2, 4, … further on, in ⌈lg n⌉ rounds."""
    rounds = range((ranks - 1).bit_length())
    transfers = tuple(Transfer(rank, (rank + 2**k) % ranks, 0) for k in rounds for rank in range(ranks))
    return Operation("barrier", "dissemination", 0, transfers, 0.0)


@lru_cache(maxsize=4096)
def gloo_operation(kind: str, size: int, ranks: int, root: int) -> Operation | None:
    """Return a recorded collective operation as implemented by Gloo; None if its implementation is not known.

    `size` is that of the tensor, or of all ranks' tensors together for gather, scatter, all_gather and reduce_scatter.
    Items are assumed to have four bytes, which shifts the segments of a ring by a few bytes at most.
    """
    item_bytes = 4 if size % 4 == 0 else 1
    items, each = size // item_bytes, Gradient("", size // ranks, 1)
    known: dict[str, Callable[[], Operation]] = {
        "all_reduce": lambda: all_reduce(items, item_bytes, ranks, 0.0),
        "reduce_scatter": lambda: all_reduce(items, item_bytes, ranks, 0.0),  # Gloo implements it as an all_reduce.
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
    return operation if root <= 0 or kind == "reduce" else _rotated(operation, root, ranks)


def sent_by_rank(kind: str, size: int, ranks: int, root: int, rank: int) -> int:
    """Return the bytes that one rank sends in a recorded operation, as implemented by Gloo.

    If the implementation is not known, every rank but the root is assumed to send the whole size.
    """
    if kind in ("send", "recv"):
        return size if kind == "send" else 0
    operation = gloo_operation(kind, size, ranks, root)
    return size * (rank != root) if operation is None else _sent_in(operation, rank)


def _rotated(operation: Operation, root: int, ranks: int) -> Operation:
    """Return an operation with all ranks shifted so that `root` replaces rank 0."""
    moved = [
        replace(transfer, source=(transfer.source + root) % ranks, target=(transfer.target + root) % ranks)
        for transfer in operation.transfers
    ]
    return replace(operation, transfers=tuple(moved))


def _sent_in(operation: Operation, rank: int) -> int:
    return sum(transfer.bytes for transfer in operation.transfers if transfer.source == rank)
