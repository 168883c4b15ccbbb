"""Measure the link between ranks: latency and bandwidth of pairs, and all-reduces over many ranks.

Measurements use the process group and the device that training uses. A time budget limits the number of repeats, so
that a slow link takes little longer than a fast one. The ranks agree on that number, so that every message that one
rank sends is received by another.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.messages.json_messages import gather_typed
from paceline.comm.messages.typed import irecv, isend
from paceline.records.examination import AllReducePoint, PairLink, PairPoint

GROWTH = 4
PAIR_BYTES = tuple(32 * 1024 * GROWTH**power for power in range(6))
"""32 KiB to 32 MiB: from where bandwidth starts to matter to more than most caches hold."""
ALL_REDUCE_BYTES = tuple(1024 * GROWTH**power for power in range(9))
"""1 KiB to 64 MiB."""
TINY_BYTES = 4
PAIR_S = 0.8
ALL_REDUCE_S = 1.8
"""Time budgets in seconds; a link that is too slow for them is still measured with a few sizes."""
LATENCY_SHARE = 0.15
"""Share of a pair's budget that is spent on latency."""
WARM_UP = 5
MIN_REPEATS, MAX_REPEATS, BATCH = 3, 200, 8
MIN_SIZES = 3
MIN_BUDGET_PER_SIZE_S = 1.0
"""On a slow link a size is still measured if two messages take less than this: small messages alone
overstate its speed."""
MAX_PAIRS_PER_HOST = 7
MAX_PAIRS_BETWEEN = 12


def measure_pairs(comm: Comm, hosts: Sequence[int], pair_s: float = PAIR_S) -> list[PairLink]:
    """Measure the links within and between hosts one after the other; return the same list on every rank.

    `hosts` has the host of each rank.
    """
    measured: list[PairLink] = []
    for one, other in pairs_to_measure(hosts):
        comm.control.barrier()  # Links may share a wire, so one pair is measured at a time.
        if comm.rank == one:
            measured.append(_measure_pair(comm, other, hosts, pair_s))
        elif comm.rank == other:
            _echo_messages(comm, one)
    pairs = [pair for rank in gather_typed(measured, list[PairLink], comm.control) for pair in rank]
    return sorted(pairs, key=lambda pair: not pair.within_host)


def pairs_to_measure(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs to measure: within a host its first rank with the others, between hosts their first ranks."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    within = [(ranks[0], other) for ranks in members.values() for other in ranks[1 : 1 + MAX_PAIRS_PER_HOST]]
    first_ranks = [ranks[0] for ranks in members.values()]
    between = list(itertools.combinations(first_ranks, 2))
    if len(between) > MAX_PAIRS_BETWEEN:  # Too many: measure each host with two others, as in a ring.
        between = [*itertools.pairwise(first_ranks), (first_ranks[0], first_ranks[-1])]
    return within + between


def measure_all_reduce(comm: Comm, budget_s: float = ALL_REDUCE_S) -> list[AllReducePoint]:
    """Time all-reduces over all ranks of `comm`, small to large, within the budget; return the same on every rank."""
    factor = 2 * (comm.world_size - 1) / comm.world_size
    points: list[AllReducePoint] = []
    time_all_reduces(comm, torch.zeros(1, device=comm.device), WARM_UP)  # The first one opens connections.
    left_s = budget_s
    for index, size in enumerate(ALL_REDUCE_BYTES):
        if len(points) >= MIN_SIZES and 2 * GROWTH * points[-1].time_s > max(left_s, MIN_BUDGET_PER_SIZE_S):
            break
        run = functools.partial(time_all_reduces, comm, torch.zeros(size // 4, device=comm.device))
        first_s, times = _time_repeats(run, left_s / (len(ALL_REDUCE_BYTES) - index))
        left_s -= first_s + sum(times)
        time_s = statistics.median(times)
        points.append(AllReducePoint(size, time_s, size / time_s, factor * size / time_s, len(times)))
    return points


def time_all_reduces(comm: Comm, buffer: Tensor, repeats: int) -> list[float]:
    """Return the seconds of each all-reduce on its slowest rank."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        dist.all_reduce(buffer, group=comm.group)
        wait_for_gpu(comm)
        times.append(time.perf_counter() - began)
    all_times = torch.stack(comm.control.gather(torch.tensor(times, dtype=torch.float64)))
    slowest: list[float] = all_times.amax(dim=0).tolist()
    return slowest


def wait_for_gpu(comm: Comm) -> None:
    """Wait until a GPU has finished: its work continues after a call has returned."""
    if comm.device.type == "cuda":
        torch.cuda.current_stream(comm.device).synchronize()


def slope(sizes: Sequence[float], times_s: Sequence[float]) -> float:
    """Return the seconds per byte by least squares; by the largest message alone if noise makes that negative."""
    mean_size, mean_s = statistics.fmean(sizes), statistics.fmean(times_s)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    found = sum((size - mean_size) * (t - mean_s) for size, t in zip(sizes, times_s, strict=True)) / spread
    return found if found > 0 else times_s[-1] / sizes[-1]


def _measure_pair(comm: Comm, peer: int, hosts: Sequence[int], budget_s: float) -> PairLink:
    """Measure the link to `peer`, which runs `_echo_messages`."""
    _round_trips(comm, peer, TINY_BYTES, WARM_UP)  # The first one opens connections.
    _, times = _time_repeats(functools.partial(_round_trips, comm, peer, TINY_BYTES), LATENCY_SHARE * budget_s)
    alpha_s = statistics.median(times) / 2
    points: list[PairPoint] = []
    left_s = (1 - LATENCY_SHARE) * budget_s
    for index, size in enumerate(PAIR_BYTES):
        if len(points) >= MIN_SIZES and 4 * GROWTH * points[-1].one_way_s > max(left_s, MIN_BUDGET_PER_SIZE_S):
            break
        run = functools.partial(_round_trips, comm, peer, size)
        first_s, times = _time_repeats(run, left_s / (len(PAIR_BYTES) - index))
        left_s -= first_s + sum(times)
        points.append(PairPoint(size, statistics.median(times) / 2, len(times)))
    _request_echoes(comm, peer, 0, 0)
    return PairLink(
        ranks=[comm.rank, peer],
        hosts=[hosts[comm.rank], hosts[peer]],
        alpha_s=alpha_s,
        beta_s_per_byte=slope([point.bytes for point in points], [point.one_way_s for point in points]),
        points=points,
    )


def _time_repeats(run: Callable[[int], list[float]], budget_s: float) -> tuple[float, list[float]]:
    """Return the seconds of one warm-up call, and of as many more as the budget allows.

    Calls are made a few at a time, since their duration may change: a shaped link often lets the first bytes pass
    without delay.
    """
    (first_s,) = run(1)
    if first_s > budget_s:
        return first_s, run(1)
    times: list[float] = []
    left_s, each_s = budget_s - first_s, first_s
    while len(times) < MIN_REPEATS or (left_s > each_s and len(times) < MAX_REPEATS):
        some = run(max(1, min(BATCH, int(left_s / each_s))))
        times += some
        left_s, each_s = left_s - sum(some), max(some)
    return first_s, times


def _round_trips(comm: Comm, peer: int, size: int, repeats: int) -> list[float]:
    """Return the seconds of each round trip of a message of `size` bytes."""
    _request_echoes(comm, peer, size, repeats)
    buffer = torch.zeros(size // 4, device=comm.device)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        isend(buffer, peer, comm).wait()
        irecv(buffer, peer, comm).wait()
        wait_for_gpu(comm)
        times.append(time.perf_counter() - began)
    return times


def _request_echoes(comm: Comm, peer: int, size: int, repeats: int) -> None:
    """Ask `peer` to echo `repeats` messages of `size` bytes; 0 repeats end the measurement."""
    dist.send(torch.tensor([size, repeats]), group_dst=peer, group=comm.control.group)


def _echo_messages(comm: Comm, peer: int) -> None:
    """Send every message of `peer` back to it, until it requests 0 repeats."""
    buffer = torch.zeros(0, device=comm.device)
    request = torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(request, group_src=peer, group=comm.control.group)
        size, repeats = request.tolist()
        if repeats == 0:
            return
        if buffer.numel() != size // 4:
            buffer = torch.zeros(size // 4, device=comm.device)
        for _ in range(repeats):
            irecv(buffer, peer, comm).wait()
            isend(buffer, peer, comm).wait()
