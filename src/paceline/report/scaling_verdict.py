"""What a scaling experiment comes down to, in plain sentences, each with the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.analysis.scaling.curves import (
    HostCountComparison,
    Mode,
    Scaling,
    ScalingCurve,
    ScalingGain,
    ScalingPeak,
    ScalingPoint,
)
from paceline.analysis.statistics import Estimate
from paceline.report.formatting import factor, percent, plural, seconds

TITLES: dict[Mode, str] = {"strong": "Strong scaling", "weak": "Weak scaling"}
NOT_SCALED = "The learning rate is the same for all of them: this is about time, not about what is learnt."


def sentences(scaling: Scaling) -> list[str]:
    """What is fastest, what each strategy gains, where adding ranks stops paying, and what else stands out."""
    told = [f"{TITLES[mode]}: {sentence}" for mode in scaling.modes for sentence in mode_sentences(scaling, mode)]
    return [headline_of(scaling), *told, *closing(scaling)]


def mode_sentences(scaling: Scaling, mode: Mode) -> list[str]:
    """What one kind of scaling shows."""
    curves = scaling.candidates(mode)
    told = _weak if mode == "weak" else _strong
    return [*[sentence for curve in curves for sentence in told(scaling, curve)], *_spread(scaling, mode)]


def closing(scaling: Scaling) -> list[str]:
    """What holds for all of it."""
    cut = "This experiment was interrupted: it tells what was measured until then."
    return [*_alone(scaling), *_without_intervals(scaling), *([cut] if scaling.comparison.interrupted else [])]


def _without_intervals(scaling: Scaling) -> Iterator[str]:
    """That one repeat proves nothing, once."""
    repeats = {row.repeats for row in scaling.comparison.rows if row.is_measured}
    if repeats == {1}:
        yield "One repeat gives no interval: no difference here is certain."
    elif 1 in repeats:
        yield "What was measured only once has no interval: no such difference is certain."


def kind_in_words(scaling: Scaling, mode: Mode) -> str:
    """Which kind of scaling this is, with its batches."""
    points = scaling.points(mode)
    batches = sorted({point.batch for point in points})
    if mode == "strong":
        return (
            f"the global batch stays at {batches[0]:,}, so more ranks get fewer samples each. "
            "With N ranks a step should take an Nth of the time."
        )
    share = min(point.batch_per_rank for point in points)
    return (
        f"every rank gets {share:,.0f} samples, so the global batch grows with the ranks, from {batches[0]:,} to "
        f"{batches[-1]:,}. A step should take as long on N ranks as on one."
    )


def hosts_in_words(scaling: Scaling) -> str:
    """What the ranks ran on."""
    hosts = max((point.hosts for mode in scaling.modes for point in scaling.points(mode)), default=1)
    design = scaling.design
    kind = "emulated host" if design.get("emulated") else "host"
    share = design.get("host_cpus")
    of = f" of {share:g} core{'' if share <= 1 else 's'} each" if share is not None else ""
    spec = str(design.get("emulated") or "")
    rate = f" ({spec})" if "@" in spec else ""
    return f"up to {plural(hosts, kind)}{of}{rate}" if hosts > 1 else "one host"


def where(point: ScalingPoint, scaling: Scaling) -> str:
    """The ranks of a point, and over how many hosts where there are several ways to place them."""
    placed = point.ranks > 1 and any(curve.ranks_per_host is not None for curve in scaling.curves)
    return plural(point.ranks, "rank") + (f" over {plural(point.hosts, 'host')}" if placed else "")


def headline_of(scaling: Scaling) -> str:
    """The fastest of all, against one process."""
    best = next((point for mode in scaling.modes if (point := scaling.best(mode)) is not None), None)
    if best is None or best.row.step_s is None:
        return "Nothing that speed could be told of was measured."
    gain = best.over_single or best.over_one_rank
    what, time = f"{best.strategy} on {where(best, scaling)}", f"{seconds(best.row.step_s.value)} per step"
    if gain is None:
        return f"{what} took the least time: {time}; there is no baseline to hold it against."
    if _uncertain(gain.speed_up):
        return f"{what} cannot be told from {_base(best, gain)} in speed: {_times(gain.speed_up)} as fast, {time}."
    if gain.speed_up.value < 1:
        slower = f"{_times(gain.speed_up)} as fast as {_base(best, gain)}"
        return f"Train in one process: {what}, the best that shares the work, is {slower}."
    return f"{what} is {_times(gain.speed_up)} as fast as {_base(best, gain)}: {time}{_efficient(gain)}."


def _strong(scaling: Scaling, curve: ScalingCurve) -> Iterator[str]:
    """What a strategy gains on its most ranks, and up to where adding ranks pays."""
    point = curve.last
    gains = [gain for gain in (point.over_single, point.over_one_rank) if gain is not None]
    if point.ranks > 1 and gains:
        yield f"{curve.strategy} on {where(point, scaling)} {'; '.join(_faster(point, gain) for gain in gains)}."
    peak = scaling.peak(curve)
    if peak is not None:
        yield from _peak(scaling, peak)


def _faster(point: ScalingPoint, gain: ScalingGain) -> str:
    """What a point gains over a baseline, no more certain than its interval."""
    if _uncertain(gain.speed_up):
        return f"cannot be told from {_base(point, gain)} in speed: {_times(gain.speed_up)}"
    if gain.speed_up.value < 1:
        return f"is slower than {_base(point, gain)}: {_times(gain.speed_up)} as fast{_efficient(gain)}"
    return f"is {_times(gain.speed_up)} as fast as {_base(point, gain)}{_efficient(gain)}"


def _weak(scaling: Scaling, curve: ScalingCurve) -> Iterator[str]:
    """By how much a step became longer: the speed-up counts samples, of which there are as many times more as ranks."""
    point = curve.last
    gains = [gain for gain in (point.over_single, point.over_one_rank) if gain is not None]
    if point.ranks > 1 and gains:
        told = "; ".join(_longer(point, gain) for gain in gains)
        yield f"A step of {curve.strategy} on {where(point, scaling)} {told}."


def _longer(point: ScalingPoint, gain: ScalingGain) -> str:
    longer = point.step_time_ratio(gain)
    if _uncertain(longer):
        return f"cannot be told from that of {_base(point, gain)} in length: {_times(longer)}{_efficient(gain)}"
    return f"takes {_times(longer)} as long as with {_base(point, gain)}{_efficient(gain)}"


def _peak(scaling: Scaling, peak: ScalingPeak) -> Iterator[str]:
    """Up to where adding ranks paid."""
    name, best = peak.curve.strategy, peak.best
    if peak.beyond is not None:
        more = f"on {peak.beyond_ranks} a step takes {_times(peak.beyond)} as long"
        if _uncertain(peak.beyond) or peak.beyond.value < 1:
            yield f"{name}: whether ranks beyond {where(best, scaling)} pay cannot be told: {more}."
        else:
            yield f"{name}: adding ranks stops paying at {where(best, scaling)}: {more}."
    elif peak.before is not None:
        gained = f"{peak.before_ranks} to {best.ranks} ranks: {_times(peak.before)} as fast"
        if _uncertain(peak.before) or peak.before.value < 1:
            yield f"{name}: whether the last ranks that were added pay cannot be told ({gained})."
        else:
            most = "the most that were tried" if best is peak.curve.points[-1] else "the most that count"
            yield f"{name}: adding ranks pays up to {where(best, scaling)}, {most} ({gained})."


def _alone(scaling: Scaling) -> Iterator[str]:
    """What strategies cost where there is nobody to send to."""
    for mode in scaling.modes[:1]:
        costs = [(point.strategy, ratio) for point, ratio in scaling.single_rank_overheads(mode)]
        if costs:
            yield f"On one rank, where nothing is sent, against single: {_each(costs)}."


def _spread(scaling: Scaling, mode: Mode) -> Iterator[str]:
    """Several processes on a host against several hosts."""
    groups: dict[tuple[int, int, int], list[HostCountComparison]] = {}
    for spread in scaling.host_count_comparisons(mode):
        if spread.fewer.candidate.role == "candidate":
            groups.setdefault((spread.fewer.ranks, spread.fewer.hosts, spread.more.hosts), []).append(spread)
    for (ranks, fewer, more), own in groups.items():
        times = _each([(spread.fewer.strategy, spread.ratio) for spread in own])
        yield f"{ranks} ranks over {plural(fewer, 'host')} instead of {more}: {times}."


def _each(ratios: Sequence[tuple[str, Estimate]]) -> str:
    """A ratio for each strategy: first those that differ, then those that cannot be told from 1."""
    known = [f"{_times(ratio)} the time for {name}" for name, ratio in ratios if not _uncertain(ratio)]
    unsure = [f"{name} cannot be told apart, {_times(ratio)}" for name, ratio in ratios if _uncertain(ratio)]
    return "; ".join([*known, *unsure])


def _base(point: ScalingPoint, gain: ScalingGain) -> str:
    return "single" if gain is point.over_single else "itself on 1 rank"


def _uncertain(ratio: Estimate) -> bool:
    """Whether its interval holds 1; without an interval nothing is, which is said once, for all."""
    return ratio.low is not None and ratio.spans(1)


def _efficient(gain: ScalingGain) -> str:
    share = gain.efficiency
    if share is None or share.is_vague:
        return ""
    apart = "" if share.low is None or share.high is None else f" ({100 * share.low:.0f}–{percent(share.high, 0)})"
    return f", {percent(share.value, 0)}{apart} efficient"


def _times(ratio: Estimate) -> str:
    """A ratio and its interval; of one that is too wide to be read only how few repeats it is from."""
    if ratio.low is None or ratio.high is None:
        return factor(ratio.value)
    vague = ratio.is_vague and ratio.spans(1)
    apart = f"n = {ratio.repeats}" if vague else f"{ratio.low:.2f}–{ratio.high:.2f}"
    return f"{factor(ratio.value)} ({apart})"


def vague(estimate: Estimate) -> str:
    """What stands for an interval that is too wide to be read."""
    return f"too wide (n = {estimate.repeats})"
