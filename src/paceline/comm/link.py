"""Measures what joins the ranks: latency and bandwidth between two, all-reduces over all, both against computing.

All of it is measured as training would use it: the run's backend, its device, its threads. Repeats are as many as a time
budget allows, so that a slow link takes not much longer than a fast one; how many is agreed on by the ranks, since none
may send what another does not wait for.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.messages import irecv, isend
from paceline.comm.texts import gather_json
from paceline.records.examination import AllReducePoint, Contention, PairLink, PairPoint

PAIR_BYTES = tuple(32 * 1024 * 4**power for power in range(6))
"""32 KiB to 32 MiB: from where bandwidth starts to count to more than any cache holds."""
ALL_REDUCE_BYTES = tuple(1024 * 4**power for power in range(9))
"""1 KiB to 64 MiB."""
PAIR_S = 0.8
"""Seconds for one pair; what a slow link needs more is two messages of each of two sizes."""
ALL_REDUCE_S = 1.8
CONTENTION_S = 1.2
LATENCY_SHARE = 0.2
MOST_REPEATS = 200
LEAST_SIZES = 2
"""Fewer do not make a slope."""
MOST_PAIRS_PER_HOST = 7
MOST_PAIRS_BETWEEN = 12
ROUNDS = 3
CONTENTION_BYTES = 4 * 1024**2
PRODUCT_SIDE = {"cpu": 384, "cuda": 4096}
"""Of the square matrices that are multiplied: some milliseconds."""


def measure_pairs(comm: Comm, hosts: Sequence[int], pair_s: float = PAIR_S) -> list[PairLink]:
    """The links within hosts and between them, one after the other; `hosts` has each rank's. On every rank.

    Within a host, from its first rank to the others; between hosts, from first rank to first rank.
    """
    own: list[PairLink] = []
    for one, other in pairs_to_measure(hosts):
        comm.smallest(0)  # One pair at a time: links may share a wire.
        if comm.rank == one:
            own.append(_measure_from(comm, other, hosts, pair_s))
        elif comm.rank == other:
            _answer(comm, one)
    return [PairLink(**_revived(found)) for rank in gather_json([_plain(p) for p in own], comm) for found in rank]
