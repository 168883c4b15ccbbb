"""Verdict of a scaling experiment: a few sentences, each with the figures that support it."""

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
from paceline.formatting import (
    SHARE,
    format_cores,
    interval,
    percent,
    plural,
    seconds,
    short,
    whole,
)
from paceline.report.verdict.phrases import format_ratio, spans_one, without_intervals

TITLES: dict[Mode, str] = {"strong": "Strong scaling", "weak": "Weak scaling"}
ONLY_TIME = "this experiment measures time, not accuracy."


def sentences(scaling: Scaling) -> list[str]:
    """Return the whole verdict: the fastest point, the gain of each strategy, and remarks on all points."""
    found = [f"{TITLES[mode]}: {sentence}" for mode in scaling.modes for sentence in mode_sentences(scaling, mode)]
    return [headline_sentence(scaling), *found, *closing_sentences(scaling)]


def mode_sentences(scaling: Scaling, mode: Mode) -> list[str]:
    """Return the results of strong or weak scaling."""
    curves = scaling.candidates(mode)
    describe = _weak if mode == "weak" else _strong
    return [*[sentence for curve in curves for sentence in describe(scaling, curve)], *_placement(scaling, mode)]


def closing_sentences(scaling: Scaling) -> list[str]:
    """Return remarks on the experiment as a whole."""
    cut = "This experiment was interrupted: it covers only the runs that had finished by then."
    return [
        *_one_rank_cost(scaling),
        *without_intervals(scaling.comparison),
        *([cut] if scaling.comparison.interrupted else []),
    ]


def learning_rate_note(scaling: Scaling) -> str:
    """Return a note on the learning rates of the points, as far as they are known: accuracies are not compared."""
    topologies = [entry.run.topology for entry in scaling.record_set.runs]
    rates = {one.batch: one.lr for one in topologies if one.batch is not None and one.lr is not None}
    if not rates:
        return ONLY_TIME.capitalize()
    if len(set(rates.values())) == 1:
        return f"The learning rate is the same at every batch size: {ONLY_TIME}"
    least, most = min(rates), max(rates)
    ends = [f"{short(rates[batch], 3)} at batch {whole(batch)}" for batch in (least, most)]
    return f"The learning rate was scaled with the batch, from {ends[0]} to {ends[1]}: {ONLY_TIME}"


def format_mode(scaling: Scaling, mode: Mode) -> str:
    """Describe strong or weak scaling, with the batches of this experiment."""
    points = scaling.points(mode)
    batches = sorted({point.batch for point in points})
    if mode == "strong":
        return (
            f"the global batch stays at {whole(batches[0])}, so more ranks get fewer samples each. "
            "Ideally a step on N ranks takes 1/N of the time."
        )
    share = min(point.batch_per_rank for point in points)
    return (
        f"every rank gets {whole(share)} samples, so the global batch grows with the ranks, from {whole(batches[0])} "
        f"to {whole(batches[-1])}. Ideally a step takes as long on N ranks as on one."
    )


def format_hosts_used(scaling: Scaling) -> str:
    """Format the hosts that the ranks ran on."""
    hosts = max((point.hosts for mode in scaling.modes for point in scaling.points(mode)), default=1)
    design = scaling.design
    kind = "emulated host" if design.emulated else "host"
    share = design.host_cpus
    of = f" of {format_cores(share)} each" if share is not None else ""
    spec = str(design.emulated or "")
    rate = f" ({spec})" if "@" in spec else ""
    return f"up to {plural(hosts, kind)}{of}{rate}" if hosts > 1 else "one host"


def format_ranks(point: ScalingPoint, scaling: Scaling) -> str:
    """Format the ranks of a point, with its hosts where the experiment places ranks in several ways."""
    placed = point.ranks > 1 and any(curve.ranks_per_host is not None for curve in scaling.curves)
    return plural(point.ranks, "rank") + (f" over {plural(point.hosts, 'host')}" if placed else "")


def headline_sentence(scaling: Scaling) -> str:
    """Return the fastest point, compared with one process."""
    best = next((point for mode in scaling.modes if (point := scaling.best(mode)) is not None), None)
    if best is None or best.row.step_s is None:
        return "No step was timed."
    gain = best.over_single or best.over_one_rank
    what, time = f"{best.strategy} on {format_ranks(best, scaling)}", f"{seconds(best.row.step_s.value)} per step"
    if gain is None:
        return f"{what} took the least time: {time}; there is no baseline to compare it with."
    baseline, ratio = _baseline(best, gain), format_ratio(gain.speed_up)
    if scaling.is_in_doubt(best, gain):
        more = f"measured while other programs used the cores, is more than {plural(best.ranks, 'rank')} can gain"
        return f"The speed-up of {what} over {baseline} is not known: {ratio}, {more}; it takes {time}."
    if spans_one(gain.speed_up):
        return f"{what} shows no measurable difference in speed from {baseline}: {ratio} as fast, {time}."
    if gain.speed_up.value < 1:
        return f"Train in one process: {what}, the fastest distributed run, is only {ratio} as fast as {baseline}."
    return f"{what} is {ratio} as fast as {baseline}: {time}{_format_efficiency(gain)}."


def _strong(scaling: Scaling, curve: ScalingCurve) -> Iterator[str]:
    """Yield the gain of a strategy on its most ranks, and the number of ranks beyond which more do not help."""
    point = curve.last
    gains = [gain for gain in (point.over_single, point.over_one_rank) if gain is not None]
    if point.ranks > 1 and gains:
        clauses = "; it ".join(_speed_clause(point, gain) + _doubt(scaling, point, gain) for gain in gains)
        yield f"{curve.strategy} on {format_ranks(point, scaling)} {clauses}."
    peak = scaling.peak(curve)
    if peak is not None:
        yield from _peak(scaling, peak)


def _speed_clause(point: ScalingPoint, gain: ScalingGain) -> str:
    """Return the gain of a point over a baseline, no more certain than its interval."""
    baseline, ratio = _baseline(point, gain), format_ratio(gain.speed_up)
    if spans_one(gain.speed_up):
        return f"shows no measurable difference in speed from {baseline}: {ratio} as fast"
    if gain.speed_up.value < 1:
        return f"is slower than {baseline}: {ratio} as fast{_format_efficiency(gain)}"
    return f"is {ratio} as fast as {baseline}{_format_efficiency(gain)}"


def _weak(scaling: Scaling, curve: ScalingCurve) -> Iterator[str]:
    """Yield how much longer a step became; the speed-up counts samples, which grow with the ranks."""
    point = curve.last
    gains = [gain for gain in (point.over_single, point.over_one_rank) if gain is not None]
    if point.ranks > 1 and gains:
        clauses = "; it ".join(_length_clause(point, gain) + _doubt(scaling, point, gain) for gain in gains)
        yield f"A step of {curve.strategy} on {format_ranks(point, scaling)} {clauses}."


def _length_clause(point: ScalingPoint, gain: ScalingGain) -> str:
    longer = point.step_time_ratio(gain)
    baseline, efficiency = _baseline(point, gain), _format_efficiency(gain)
    if spans_one(longer):
        ratio = f"{format_ratio(longer)} as long"
        return f"shows no measurable difference in length from that of {baseline}: {ratio}{efficiency}"
    return f"takes {format_ratio(longer)} as long as with {baseline}{efficiency}"


def _doubt(scaling: Scaling, point: ScalingPoint, gain: ScalingGain) -> str:
    return f", more than {plural(point.ranks, 'rank')} can gain" if scaling.is_in_doubt(point, gain) else ""


def _peak(scaling: Scaling, peak: ScalingPeak) -> Iterator[str]:
    """Yield the number of ranks on which a strategy is fastest, compared with the next more or fewer ranks."""
    best, per_host = peak.best, peak.curve.ranks_per_host
    name = peak.curve.strategy + ("" if per_host is None else f" with {plural(per_host, 'rank')} per host")
    ranks = format_ranks(best, scaling)
    if peak.beyond is not None:
        more = f"on {peak.beyond_ranks} a step takes {format_ratio(peak.beyond)} as long"
        if spans_one(peak.beyond) or peak.beyond.value < 1:
            yield f"{name} is fastest on {ranks}, with no measurable difference from more ranks: {more}."
        else:
            yield f"{name} is fastest on {ranks}: {more}."
    elif peak.before is not None:
        gained = f"{peak.before_ranks} to {best.ranks} ranks: {format_ratio(peak.before)} as fast"
        if spans_one(peak.before) or peak.before.value < 1:
            yield f"{name} is fastest on {ranks}, with no measurable difference from fewer ranks ({gained})."
        else:
            most = "the most that were measured"
            if any(point.oversubscribed for point in peak.curve.points if point.ranks > best.ranks):
                most = "the largest world size with enough cores or GPUs for every rank"
            yield f"{name} is fastest on {ranks}, {most} ({gained})."


def _one_rank_cost(scaling: Scaling) -> Iterator[str]:
    """Yield the overhead of strategies on one rank, where nothing is sent."""
    for mode in scaling.modes[:1]:
        costs = [(point.strategy, ratio) for point, ratio in scaling.single_rank_overheads(mode)]
        if costs:
            yield f"On one rank, where nothing is sent, compared with one process: {_format_ratios(costs)}."


def _placement(scaling: Scaling, mode: Mode) -> Iterator[str]:
    """Yield comparisons of the same ranks on fewer and on more hosts."""
    groups: dict[tuple[int, int, int], list[HostCountComparison]] = {}
    for spread in scaling.host_count_comparisons(mode):
        if spread.fewer.candidate.role == "candidate":
            groups.setdefault((spread.fewer.ranks, spread.fewer.hosts, spread.more.hosts), []).append(spread)
    for (ranks, fewer, more), own in groups.items():
        times = _format_ratios([(spread.fewer.strategy, spread.ratio) for spread in own])
        yield f"{ranks} ranks over {plural(fewer, 'host')} instead of {more}: {times}."


def _format_ratios(ratios: Sequence[tuple[str, Estimate]]) -> str:
    """Format a ratio of times for each strategy: first those that differ from 1, then those that may not."""
    known = [f"{format_ratio(ratio)} the time for {name}" for name, ratio in ratios if not spans_one(ratio)]
    unsure = [
        f"no measurable difference for {name}, {format_ratio(ratio)}" for name, ratio in ratios if spans_one(ratio)
    ]
    return "; ".join([*known, *unsure])


def _baseline(point: ScalingPoint, gain: ScalingGain) -> str:
    return "one process" if gain is point.over_single else "itself on 1 rank"


def _format_efficiency(gain: ScalingGain) -> str:
    share = gain.efficiency
    if share is None or share.is_vague:
        return ""
    ends = interval(share.low, share.high, SHARE)  # Of two repeats, the speed-up has both values.
    return f", efficiency {percent(share.value, 0)}" + (f" ({ends}%)" if ends else "")
