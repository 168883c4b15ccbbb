"""What a scaling experiment comes down to, in plain sentences, each with the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.scaling import Curve, Gain, Mode, Peak, Point, Scaling, Spread
from paceline.analysis.statistics import Estimate
from paceline.report.words import factor, listed, percent, plural, seconds

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
    return [*_alone(scaling), *([cut] if scaling.comparison.interrupted else [])]


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


def where(point: Point, scaling: Scaling) -> str:
    """The ranks of a point, and over how many hosts where there are several ways to place them."""
    placed = point.ranks > 1 and any(curve.ranks_per_host is not None for curve in scaling.curves)
    return plural(point.ranks, "rank") + (f" over {plural(point.hosts, 'host')}" if placed else "")


def headline_of(scaling: Scaling) -> str:
    """The fastest of all, against one process."""
    best = next((point for mode in scaling.modes if (point := scaling.best(mode)) is not None), None)
    if best is None or best.row.step_s is None:
        return "Nothing that speed could be told of was measured."
    gain = best.over_single or best.over_itself
    what, time = f"{best.strategy} on {where(best, scaling)}", f"{seconds(best.row.step_s.value)} per step"
    if gain is None:
        return f"{what} is the fastest: {time}; there is no baseline to hold it against."
    if gain.speed_up.high is not None and gain.speed_up.high < 1:
        slower = f"{_times(gain.speed_up)} as fast as {_base(best, gain)}"
        return f"Train in one process: {what}, the best that shares the work, is {slower}."
    if gain.speed_up.low is not None and gain.speed_up.spans(1):
        return f"{what} cannot be told from {_base(best, gain)} in speed: {_times(gain.speed_up)} as fast, {time}."
    return f"{what} is {factor(gain.speed_up.value)} as fast as {_base(best, gain)}: {time}{_efficient(gain)}."


def _strong(scaling: Scaling, curve: Curve) -> Iterator[str]:
    """What a strategy gains on its most ranks, and up to where adding ranks pays."""
    point = curve.last
    over, itself = point.over_single, point.over_itself
    if point.ranks > 1 and itself is not None and itself.speed_up.high is not None and itself.speed_up.high < 1:
        slower = f"{_times(itself.speed_up)} as fast"
        yield f"{curve.strategy} is slower on {where(point, scaling)} than on 1: {slower}."
        itself = None
    gains = [gain for gain in (over, itself) if gain is not None]
    if point.ranks > 1 and gains:
        told = [f"{factor(gain.speed_up.value)} as fast as {_base(point, gain)}{_efficient(gain)}" for gain in gains]
        yield f"{curve.strategy} on {where(point, scaling)} is {'; '.join(told)}."
    peak = scaling.peak(curve)
    if peak is not None:
        yield _peak(scaling, peak)


def _weak(scaling: Scaling, curve: Curve) -> Iterator[str]:
    """By how much a step became longer: the speed-up counts samples, of which there are as many times more as ranks."""
    point = curve.last
    gains = [gain for gain in (point.over_single, point.over_itself) if gain is not None]
    if point.ranks > 1 and gains:
        told = [
            f"{_times(point.longer(gain))} as long as with {_base(point, gain)}{_efficient(gain)}" for gain in gains
        ]
        yield f"A step of {curve.strategy} on {where(point, scaling)} takes {'; '.join(told)}."


def _peak(scaling: Scaling, peak: Peak) -> str:
    """Up to where adding ranks paid."""
    name, best = peak.curve.strategy, peak.best
    if peak.beyond is not None:
        sure = peak.beyond.low is None or not peak.beyond.spans(1)
        more = f"on {peak.beyond_ranks} a step takes {_times(peak.beyond)} as long"
        if sure:
            return f"{name}: adding ranks stops paying at {where(best, scaling)}; {more}."
        return f"{name}: whether ranks beyond {where(best, scaling)} pay cannot be told; {more}."
    gained = "" if peak.before is None else f"{peak.before_ranks} to {best.ranks} ranks: {_times(peak.before)} as fast"
    if peak.before is not None and peak.before.low is not None and peak.before.spans(1):
        return f"{name}: whether the last ranks that were added pay cannot be told ({gained})."
    most = "the most that were tried" if best is peak.curve.points[-1] else "the most that count"
    return f"{name}: adding ranks pays up to {where(best, scaling)}, {most} ({gained})."


def _alone(scaling: Scaling) -> Iterator[str]:
    """What strategies cost where there is nobody to send to."""
    for mode in scaling.modes[:1]:
        costs = scaling.alone(mode)
        if costs:
            each = listed([f"{_times(ratio)} for {point.strategy}" for point, ratio in costs])
            yield f"On one rank, where nothing is sent, the time against single is {each}."


def _spread(scaling: Scaling, mode: Mode) -> Iterator[str]:
    """Several processes on a host against several hosts."""
    groups: dict[tuple[int, int, int], list[Spread]] = {}
    for spread in scaling.spreads(mode):
        if spread.fewer.contender.role == "candidate":
            groups.setdefault((spread.fewer.ranks, spread.fewer.hosts, spread.more.hosts), []).append(spread)
    for (ranks, fewer, more), own in groups.items():
        times = listed([f"{_times(spread.ratio)} for {spread.fewer.strategy}" for spread in own])
        yield f"{ranks} ranks over {plural(fewer, 'host')} instead of {more}: the time is {times}."


def _base(point: Point, gain: Gain) -> str:
    return "single" if gain is point.over_single else "itself on 1 rank"


def _efficient(gain: Gain) -> str:
    return "" if gain.efficiency is None else f", {percent(gain.efficiency.value, 0)} efficient"


def _times(estimate: Estimate) -> str:
    apart = "" if estimate.low is None or estimate.high is None else f" ({estimate.low:.2f}–{estimate.high:.2f})"
    return f"{factor(estimate.value)}{apart}"
