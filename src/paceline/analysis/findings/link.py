"""Findings on links: latency, bandwidth, contention with compute, and communication time of the workload."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from paceline.analysis.findings.finding import Finding, format_workload
from paceline.config.emulation import parse_hosts, payload_bytes_per_s
from paceline.errors import UsageError
from paceline.formatting import ACCURACY, binary_size, bit_rate, factor, percent, plural, rate, seconds, size
from paceline.records.examination import AllReduceTimes, Examination, MeasuredLinks, PairLink

SLOW_BYTES_PER_S = 1e8
"""Bandwidth of a 1 Gbit/s network, less headers and noise."""
RATE_REACHED = 0.75
"""Share of the rate of `--emulate` below which a link clearly misses it; tc keeps rates within 3% on idle cores."""
_BUSY_FIX = "stop other programs: the cores of this machine carry the traffic"
UNEVEN_LINKS = 2.0
"""Ratio of the fastest to the slowest link from which links are reported as uneven."""
COMPUTE_SLOWED, COMMUNICATION_SLOWED = 1.25, 2.0
"""Slow-downs under contention that are reported as a note."""
LONG_EXCHANGE = 0.5
"""Share of a step, taken by an all-reduce of the gradient, that is reported as a note."""
HIGH_COST, LOOSE_COST = 0.03, 0.05
"""Overhead of collecting events that is reported as a note; half-width above which its interval is called imprecise."""


def link_findings(examination: Examination) -> Iterator[Finding]:
    """Yield the findings in the order of the checks."""
    for check in (_links, _all_reduces, _contention, _workload, _measuring):
        yield from check(examination)


def _links(examination: Examination) -> Iterator[Finding]:
    if examination.link is None:
        fix = "start at least 2 ranks, for example with --ranks 2"
        yield Finding("note", "link", "There is only one rank, so no link was measured.", fix)
        return
    for within_host, where in ((True, "Within a host"), (False, "Between hosts")):
        # Emulated hosts may have different rates. Links are compared only with those of the same rate.
        by_rate: dict[float | None, list[PairLink]] = {}
        for pair in examination.link.of(within_host=within_host):
            by_rate.setdefault(requested_bit_s(pair, examination), []).append(pair)
        for requested, pairs in by_rate.items():
            yield _rate(where, pairs, requested, examination)
            yield from _uneven(where, pairs, examination)


def requested_bit_s(pair: PairLink, examination: Examination) -> float | None:
    """Return the rate that `--emulate` sets for a link, in bits per second; None for a link without a set rate."""
    if examination.emulated is None or pair.within_host:
        return None
    try:
        hosts = parse_hosts(examination.emulated.spec)
    except UsageError:  # The record was edited, or a newer version wrote it.
        return None
    rates = [hosts[host].rate_bit_s for host in pair.hosts if host < len(hosts)]
    return min((rate for rate in rates if rate is not None), default=None)


def _rate(where: str, pairs: Sequence[PairLink], requested: float | None, examination: Examination) -> Finding:
    """Return the finding on the latency and bandwidth of links with the same requested rate."""
    slowest = max(pairs, key=lambda pair: pair.beta_s_per_byte)
    message = (
        f"{where}, latency is {seconds(max(pair.alpha_s for pair in pairs))} and bandwidth is "
        f"{rate(slowest.bytes_per_s)} {_pair(slowest)}"
    )
    if requested is not None:
        possible = payload_bytes_per_s(requested)
        asked = f"{bit_rate(requested)} ({rate(possible)} without headers) that --emulate sets"
        share = percent(slowest.bytes_per_s / possible, 0)
        if slowest.bytes_per_s >= RATE_REACHED * possible:
            return Finding("ok", "link", f"{message}, which is {share} of the {asked}.")
        return Finding("note", "link", f"{message}: only {share} of the {asked}.", f"{_BUSY_FIX}, or set a lower rate")
    if slowest.within_host or slowest.bytes_per_s >= SLOW_BYTES_PER_S:
        return Finding("ok", "link", f"{message}.")
    fix = "check that --iface names the fastest network, or send less: use a larger --batch or fewer hosts"
    fix = fix if examination.emulated is None else _BUSY_FIX
    return Finding("note", "link", f"{message}. This is slower than a 1 Gbit/s network.", fix)


def _uneven(where: str, pairs: Sequence[PairLink], examination: Examination) -> Iterator[Finding]:
    """Yield a note if links that should be equal differ."""
    slowest, fastest = (choose(pairs, key=lambda pair: pair.beta_s_per_byte) for choose in (max, min))
    if slowest.beta_s_per_byte <= UNEVEN_LINKS * fastest.beta_s_per_byte:
        return
    ratio = slowest.beta_s_per_byte / fastest.beta_s_per_byte
    message = (
        f"{where}, the fastest link has {factor(ratio)} the bandwidth of the slowest: "
        f"{rate(fastest.bytes_per_s)} {_pair(fastest)}, but {rate(slowest.bytes_per_s)} {_pair(slowest)}. "
        "The slowest link limits every all-reduce."
    )
    on_this_machine = slowest.within_host or examination.emulated is not None
    fix = _BUSY_FIX if on_this_machine else "check cables, interfaces and other traffic of the hosts of these ranks"
    yield Finding("note", "link", message, fix)


def _all_reduces(examination: Examination) -> Iterator[Finding]:
    if examination.link is None:
        return
    link, over_all_ranks = examination.link, examination.link.all_reduces[0]
    best = over_all_ranks.best
    share = best.busbw_bytes_per_s / link.bytes_per_s
    # The share may exceed 1 on GPUs: messages copy whole tensors through host memory, an all-reduce copies in pieces.
    compared = f"{percent(share, 0)} of" if share <= 1 else factor(share)
    yield Finding(
        "ok",
        "link",
        f"An all-reduce of {binary_size(best.bytes)} over {plural(len(over_all_ranks.ranks), 'rank')} reaches a bus "
        f"bandwidth of {rate(best.busbw_bytes_per_s)}: {compared} {_slowest_link(link)}.",
    )


def _contention(examination: Examination) -> Iterator[Finding]:
    found = examination.contention
    if found is None:
        return
    message = (
        f"When both run at the same time, compute takes {factor(found.compute_factor)} as long as alone, and an "
        f"all-reduce {factor(found.communication_factor)} as long."
    )
    if found.compute_factor > COMPUTE_SLOWED or found.communication_factor > COMMUNICATION_SLOWED:
        message += " Overlapping communication with compute therefore saves less time."
        yield Finding("note", "contention", message, _contention_fix(examination))
    else:
        yield Finding("ok", "contention", message)


def _contention_fix(examination: Examination) -> str:
    """Return how to reduce contention on these ranks: a single rank with one thread has nothing to give up."""
    if examination.ranks[0].device != "cpu":
        return "find the strategy that loses least to it with `paceline compare`"
    ways = ["fewer --threads"] * any(rank.threads > 1 for rank in examination.ranks)
    ways += ["fewer ranks per host"] * (len(examination.ranks) > len(examination.hosts))
    if ways:
        return f"leave a core free for communication: use {' or '.join(ways)}"
    if len({rank.boot_id for rank in examination.ranks}) < len(examination.hosts):
        return "use fewer hosts on one machine: they share its cores"
    return "use hosts with more cores: with one thread per rank and one rank per host, no core can be left free"


def _workload(examination: Examination) -> Iterator[Finding]:
    if examination.failure is not None:
        message = f"Training the workload failed: {examination.failure}"
        yield Finding("problem", "workload", message, examination.failure_hint or "")
    needs = examination.workload
    if needs is None:
        return
    if examination.link is None or needs.workers < 2:
        yield Finding("ok", "workload", f"{format_workload(needs)} takes {seconds(needs.step_s)} per step.")
        return
    exchange_s = all_reduce_s(examination.link.all_reduces[0], needs.gradient_bytes)
    share = exchange_s / needs.step_s
    message = (
        f"{format_workload(needs)} takes {seconds(needs.step_s)} per step; an all-reduce of its gradient "
        f"({size(needs.gradient_bytes)}) takes {seconds(exchange_s)}, which is {percent(share, 0)} of a step if "
        "nothing overlaps."
    )
    if share > LONG_EXCHANGE:
        message += " Communication may dominate the step."
        larger = "larger batches in the workload" if needs.batch is None else "a larger --batch"
        fix = f"use {larger}, or find the strategy that overlaps communication best with `paceline compare`"
        yield Finding("note", "workload", message, fix)
    else:
        yield Finding("ok", "workload", message)


def _measuring(examination: Examination) -> Iterator[Finding]:
    cost = examination.measuring_cost
    if cost is not None:
        share = f"{percent(cost.share)} ({ACCURACY.write(cost.low)} to {percent(cost.high)})"
        step_cpu = f"{seconds(cost.step_cpu_s)} per rank"
        if cost.low <= 0 <= cost.high:
            message = f"Collecting events has no measurable cost: {share} of the CPU time of a step ({step_cpu})."
        else:
            message = f"Collecting events adds {share} to the CPU time of a step, which is {step_cpu} without events."
        if cost.high - cost.low > 2 * LOOSE_COST:
            message += " The interval is wide because few steps were measured and the machine was busy."
        if cost.low > HIGH_COST:
            fix = "for undisturbed times use --no-events, which also omits the time split"
            yield Finding("note", "measuring", message, fix)
        else:
            yield Finding("ok", "measuring", message)


def all_reduce_s(measured: AllReduceTimes, size: float) -> float:
    """Return the seconds that an all-reduce of `size` bytes takes.

    Times are interpolated linearly between measured sizes. Below the smallest size, its time is used (latency
    dominates); above the largest, its bandwidth.
    """
    points = measured.points
    if size <= points[0].bytes:
        return points[0].time_s
    for one, other in itertools.pairwise(points):
        if size <= other.bytes:
            share = (size - one.bytes) / (other.bytes - one.bytes)
            return one.time_s + share * (other.time_s - one.time_s)
    return points[-1].time_s * size / points[-1].bytes


def _pair(pair: PairLink) -> str:
    return f"from rank {pair.ranks[0]} to rank {pair.ranks[1]}"


def _slowest_link(link: MeasuredLinks) -> str:
    return f"the bandwidth of the slowest link, {rate(link.bytes_per_s)} {_pair(link.slowest)}"
