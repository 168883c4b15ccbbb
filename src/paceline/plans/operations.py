"""The transfers that each collective operation is made of, as Gloo carries it out."""

from __future__ import annotations

from functools import lru_cache

from paceline.plans.plan import Gradient, Operation, Transfer


def all_reduce(items: int, item_bytes: int, ranks: int, earliest_s: float) -> Operation:
    """A ring: every rank passes n−1 chunks on while reducing and n−1 while gathering, each 1/n of the tensor."""
    # In 2(n−1) rounds a rank sends, of the n chunks, every one twice but for two that it sends once.
    chunks = [items // ranks + (chunk < items % ranks) for chunk in range(ranks)]
    transfers = tuple(
        Transfer(rank, (rank - 1) % ranks, (2 * items - chunks[rank] - chunks[(rank + 1) % ranks]) * item_bytes)
        for rank in range(ranks)
        if ranks > 1
    )
    return Operation("all_reduce", "ring", items * item_bytes, transfers, earliest_s)


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


@lru_cache(maxsize=4096)
def sent_by_rank(kind: str, size: int, ranks: int, root: int, rank: int) -> int:
    """The bytes that one rank sends in an operation that was seen, as Gloo carries it out.

    `size` counts as in bandwidths: the tensor's, or that over all ranks for gather, scatter, all_gather and
    reduce_scatter. What is not known by a formula counts as sent in full by every rank but the root.
    """
    place = (rank - root) % ranks if root >= 0 else rank
    if kind in ("all_reduce", "reduce_scatter"):  # Gloo's reduce_scatter moves as much as an all_reduce.
        item_bytes = 4 if size % 4 == 0 else 1
        return _sent_in(all_reduce(size // item_bytes, item_bytes, ranks, 0.0), rank)
    if kind == "broadcast":
        return _sent_in(broadcast(size, ranks), place)
    if kind in ("gather", "scatter"):
        each = size // ranks
        return each * (ranks - 1) * (place == 0) if kind == "scatter" else each * (place != 0)
    if kind in ("all_gather", "all_to_all"):
        return size // ranks * (ranks - 1)
    return {"send": size, "recv": 0, "barrier": 0}.get(kind, size * (place != 0))


def _sent_in(operation: Operation, rank: int) -> int:
    return sum(transfer.bytes for transfer in operation.transfers if transfer.source == rank)
