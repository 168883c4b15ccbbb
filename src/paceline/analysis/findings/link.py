"""What the measured link means: latency and bandwidth, contention with computing, and the workload's share of it."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings.finding import Finding, binary_size, count, duration, rate, size, trained
from paceline.analysis.link import all_reduce_s
from paceline.records.examination import Examination, MeasuredLinks, PairLink

SLOW_BYTES_PER_S = 1e8
"""What a network of one gigabit a second gives, headers and noise taken off."""
UNEVEN_LINKS = 2.0
COMPUTE_SLOWED, COMMUNICATION_SLOWED = 1.25, 2.0
LONG_EXCHANGE = 0.5
HIGH_COST, LOOSE_COST = 0.03, 0.05
"""From what share on collecting events is dear; how far from its middle an interval of it may reach."""


def link_findings(examination: Examination) -> Iterator[Finding]:
    """In the order of the checks."""
    for check in (_links, _all_reduces, _contention, _workload, _measuring):
        yield from check(examination)


def _links(examination: Examination) -> Iterator[Finding]:
    if examination.link is None:
        yield Finding("note", "link", "There is one rank, so there is no link to measure.", "use --ranks 2 or more")
        return
    for within_host, where in ((True, "Within a host"), (False, "Between hosts")):
        pairs = examination.link.of(within_host=within_host)
        if not pairs:
            continue
        slowest, fastest = (choose(pairs, key=lambda pair: pair.beta_s_per_byte) for choose in (max, min))
        latency = max(pair.alpha_s for pair in pairs)
        what = f"{where} latency is {duration(latency)} and bandwidth {rate(slowest.bytes_per_s)}, {_pair(slowest)}."
        if not within_host and slowest.bytes_per_s < SLOW_BYTES_PER_S:
            fix = "check that --iface is the fast network, or send less: larger batches, fewer hosts"
            yield Finding("note", "link", what + " That is less than a network of one gigabit a second gives.", fix)
        else:
            yield Finding("ok", "link", what)
        if slowest.beta_s_per_byte > UNEVEN_LINKS * fastest.beta_s_per_byte:
            apart = slowest.beta_s_per_byte / fastest.beta_s_per_byte
            what = (
                f"{where} links differ {apart:.1f}×: {rate(fastest.bytes_per_s)} {_pair(fastest)}, "
                f"but {rate(slowest.bytes_per_s)} {_pair(slowest)}."
            )
            fix = "every all-reduce goes at the pace of the slowest link: find out what is different there"
            yield Finding("note", "link", what, fix)


def _all_reduces(examination: Examination) -> Iterator[Finding]:
    if examination.link is None:
        return
    link, everyone = examination.link, examination.link.all_reduces[0]
    best = everyone.best
    share = best.busbw_bytes_per_s / link.bytes_per_s
    # Messages of tensors on a GPU pass through main memory one after the other, where an all-reduce does it in pieces.
    compared = f"{100 * share:.0f}% of" if share <= 1 else f"{share:.1f}×"
    what = (
        f"An all-reduce over {count(len(everyone.ranks), 'rank')} reaches {rate(best.busbw_bytes_per_s)} of busbw, "
        f"at {binary_size(best.bytes)}: {compared} {_bottleneck(link)}."
    )
    yield Finding("ok", "link", what)


def _contention(examination: Examination) -> Iterator[Finding]:
    found = examination.contention
    if found is None:
        return
    what = (
        f"Beside an all-reduce computing takes {found.compute_factor:.2f}× as long, and the all-reduce "
        f"{found.communication_factor:.2f}× as long beside computing."
    )
    if found.compute_factor > COMPUTE_SLOWED or found.communication_factor > COMMUNICATION_SLOWED:
        fix = "overlap hides less than it seems: leave a core to communication with fewer --threads or ranks per host"
        yield Finding("note", "contention", what, fix)
    else:
        yield Finding("ok", "contention", what)


def _workload(examination: Examination) -> Iterator[Finding]:
    if examination.failure is not None:
        what = f"The workload could not be trained: {examination.failure}"
        yield Finding("problem", "workload", what, examination.failure_hint or "")
    needs = examination.workload
    if needs is None:
        return
    if examination.link is None or needs.workers < 2:
        yield Finding("ok", "workload", f"{trained(needs)} takes {duration(needs.step_s)} a step.")
        return
    exchange_s = all_reduce_s(examination.link.all_reduces[0], needs.gradient_bytes)
    share = exchange_s / needs.step_s
    what = (
        f"{trained(needs)} takes {duration(needs.step_s)} a step; an all-reduce of its gradient, "
        f"{size(needs.gradient_bytes)}, takes {duration(exchange_s)}: {100 * share:.0f}% of it, if nothing hides it."
    )
    if share > LONG_EXCHANGE:
        fix = "a larger --batch has more to compute per exchange; `paceline compare` tells which strategy hides it best"
        yield Finding("note", "workload", what, fix)
    else:
        yield Finding("ok", "workload", what)


def _measuring(examination: Examination) -> Iterator[Finding]:
    cost = examination.measuring_cost
    if cost is not None:
        what = (
            f"Collecting events costs {100 * cost.share:.1f}% ({100 * cost.low:.1f} to {100 * cost.high:.1f}%) of a "
            f"step's processor time, {duration(cost.step_cpu_s)} a rank without them."
        )
        if cost.high - cost.low > 2 * LOOSE_COST:
            what += " It cannot be told more closely in so few steps, on a machine as busy as this one."
        if cost.low > HIGH_COST:
            yield Finding("note", "measuring", what, "--no-events leaves them out, and the time split with them")
        else:
            yield Finding("ok", "measuring", what)


def _pair(pair: PairLink) -> str:
    return f"from rank {pair.ranks[0]} to {pair.ranks[1]}"


def _bottleneck(link: MeasuredLinks) -> str:
    return f"what the link {_pair(link.narrowest)} gives, {rate(link.bytes_per_s)}"
