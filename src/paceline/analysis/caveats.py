"""Warnings shown above a comparison: different machines or times, shared cores, replicas that differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from paceline.analysis.chance import Chance, chance_of, epochs_of, is_stuck
from paceline.analysis.core_sharing import sharing_advice, sharing_in_run, sharing_sentence
from paceline.analysis.divergence import diverged_runs, divergence_cause
from paceline.analysis.exclusions import DRIFT, largest_drift
from paceline.analysis.gpu_use import limited_clocks
from paceline.analysis.other_load import OtherLoad, format_load, other_load
from paceline.analysis.precision import choice_sentence
from paceline.analysis.record_set import RecordSet
from paceline.analysis.replicas import difference_sentence
from paceline.analysis.scaling.machines import planned_oversubscription
from paceline.analysis.traffic.payload import payload_of
from paceline.config.slow_ranks import format_slow_ranks, parse_slow_ranks
from paceline.errors import DivergenceError
from paceline.formatting import SHARE, join_names, percent, plural, short, whole
from paceline.records import RunRecord, Summary
from paceline.records.events import (
    ContinuedEvent,
    CudaGraphEvent,
    FailureEvent,
    ParityEvent,
    ResumedEvent,
    UnprovenEvent,
    events_of,
)
from paceline.records.experiment.design import RaceDesign

MOST_PLACES = 3
"""Most diverged runs of a candidate that a warning names."""


def caveats(
    record_set: RecordSet, rank_step_spread: Mapping[str, float | None], *, shared_cores: bool = True
) -> Iterator[str]:
    """Yield the warnings to show above the table.

    `rank_step_spread` has the difference between ranks' step times by candidate, fastest candidate first. Pass
    `shared_cores=False` if the caller reports ranks that share cores itself.
    """
    machines = {(p.host, p.cpu) for p in record_set.provenances}
    if len(machines) > 1:
        names = ", ".join(sorted(f"{host} ({cpu})" for host, cpu in machines))
        yield (
            f"These records come from different machines: {names}. Their times are not comparable; "
            "run all strategies on one machine to compare them."
        )
    versions = {str(p.versions.get("torch")) for p in record_set.provenances}
    if len(versions) > 1:
        yield (
            f"These records come from different versions of torch: {', '.join(sorted(versions))}. A difference in time "
            "may come from torch; run all strategies with one version to rule that out."
        )
    if len(record_set.designs) > 1 or (not record_set.designs and len(record_set.runs) > 1):
        yield (
            "These runs were measured at different times, so other load on the machine may look like a difference "
            "between strategies. `paceline compare` interleaves runs to avoid that."
        )
    yield from _repeats_in_parts(record_set)
    yield from _different_devices(record_set)
    timed = record_set.compares_times
    if shared_cores and timed:
        found = next(filter(None, (over_subscription(entry.run) for entry in record_set.runs)), "")
        planned = next(filter(None, map(planned_oversubscription, record_set.designs)), "")
        yield from filter(None, [found or sharing_sentence(planned)])
    yield from _chosen_precisions(record_set)
    yield from _slowed(record_set)
    yield from _resumed(record_set)
    if timed:
        yield from _without_graphs(record_set)
        yield from limited_clocks(record_set)
        yield from _beside_other_load(record_set)
    yield from record_set.read_warnings
    yield from (event.reason for event in events_of(record_set.events, UnprovenEvent))
    yield from _different_by_design(record_set)
    if timed:
        yield from _uneven_ranks(record_set, rank_step_spread)
    yield from _untracked(record_set)
    yield from _unplanned(record_set)
    yield from _replica_differences(record_set)
    yield from _drifts(record_set)
    yield from _divergences(record_set, rank_step_spread)
    yield from _stuck(record_set, rank_step_spread)


def _repeats_in_parts(record_set: RecordSet) -> Iterator[str]:
    """Yield a warning on repeats whose runs were not all measured together; failed candidates are in no ratio."""
    if not events_of(record_set.events, ContinuedEvent):
        return
    failed = {event.candidate for event in events_of(record_set.events, FailureEvent)}
    keys: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for recorded in (one for one in record_set.runs if one.candidate not in failed):
        keys.setdefault(recorded.repeat, set()).add(recorded.timing_key)
    cut = sorted({repeat + 1 for (_, repeat), parts in keys.items() if len(parts) > 1})
    if cut:
        which = "Repeat" if len(cut) == 1 else "Repeats"
        verb = "was" if len(cut) == 1 else "were"
        yield (
            f"{which} {join_names([str(number) for number in cut])} {verb} measured in parts, at different times: the "
            "experiment was continued. Ratios use only pairs of runs of the same part. The same command with a larger "
            "--repeats measures further repeats."
        )


def _different_devices(record_set: RecordSet) -> Iterator[str]:
    """Yield a warning on candidates whose runs were trained on different devices, in an experiment that was moved."""
    for candidate in record_set.candidates:
        devices = {run.topology.device for run in record_set.runs_of(candidate.name).values()}
        if len(devices) > 1:
            yield (
                f"{candidate.name}: its runs were trained on different devices: {', '.join(sorted(devices))}. Their "
                "times are not comparable; run all repeats on one device."
            )


def _chosen_precisions(record_set: RecordSet) -> Iterator[str]:
    """Yield a sentence on each choice of `--precision auto`."""
    chosen = [entry.run.topology.precision_choice for entry in record_set.runs]
    yield from dict.fromkeys(f"{choice_sentence(choice)}." for choice in chosen if choice is not None)


def _different_by_design(record_set: RecordSet) -> Iterator[str]:
    """Yield the caveats of parity proofs, each with the candidates that it holds for."""
    found: dict[str, list[str]] = {}
    for event in events_of(record_set.events, ParityEvent):
        if event.caveat:
            found.setdefault(event.caveat, []).append(event.candidate)
    for caveat, names in found.items():
        yield f"{join_names(names)}: {caveat}"


def _uneven_ranks(record_set: RecordSet, rank_step_spread: Mapping[str, float | None]) -> Iterator[str]:
    """Yield one warning that names all candidates whose ranks differ in step time."""
    found = {name: spread for name, spread in rank_step_spread.items() if spread is not None}
    if found:
        least, most = SHARE.write(min(found.values())), SHARE.write(max(found.values()))
        between = f"{least}%" if least == most else f"{least} to {most}%"
        runs = [run for name in found for run in record_set.runs_of(name).values()]
        cause = (
            "ranks probably share cores with each other or with other programs. Stop other programs or use fewer ranks."
            if all(run.topology.device == "cpu" for run in runs)
            else "the GPUs or hosts differ in speed, or other programs use them. `paceline doctor` compares them."
        )
        yield f"{join_names(list(found))}: step times differ by {between} between ranks; {cause}"


def _beside_other_load(record_set: RecordSet) -> Iterator[str]:
    """Yield a warning if other programs used the cores during the runs, and what part of the spread that explains."""
    load = other_load(record_set)
    if load is None or not load.is_notable:
        return
    own = {":" in str(entry.run.config.get("workload")) or "script" in entry.run.config for entry in record_set.runs}
    others = "Other programs, or processes that the workload starts," if True in own else "Other programs"
    is_race = any(isinstance(design, RaceDesign) for design in record_set.designs)
    yield f"{others} used {format_load(load)} during the runs{_effect(load, is_race=is_race)}"


def _effect(load: OtherLoad, *, is_race: bool) -> str:
    """Return the effect of other programs on the spread of step times, as far as it is known, and what to do."""
    if is_race:
        return ", which makes times longer. Repeat on a quiet machine before comparing them with other races."
    if load.explained is None:
        return (
            ", which makes times longer and intervals wider; there are too few runs to say by how much. "
            "Repeat on a quiet machine for a narrower interval."
        )
    if round(load.explained, 2) <= 0:
        return ", but step times do not measurably follow that load from repeat to repeat."
    return (
        "; between repeats, step times follow that load: it may explain about "
        f"{percent(load.explained, 0)} of their spread. Repeat on a quiet machine for a narrower interval."
    )


def slowed_on_purpose(run: RunRecord) -> str:
    """Return a phrase on the ranks that `--slow-rank` slowed down; empty if there are none."""
    return format_slow_ranks(parse_slow_ranks(run.config.get("slow_rank") or ""))


def _slowed(record_set: RecordSet) -> Iterator[str]:
    """Yield warnings on ranks that were slowed down, with the candidates if not all are affected."""
    found: dict[str, list[str]] = {}
    for candidate in record_set.candidates:
        for what in dict.fromkeys(slowed_on_purpose(run) for run in record_set.runs_of(candidate.name).values()):
            found.setdefault(what, []).append(candidate.name)
    for what, names in found.items():
        if what:
            whose = "" if len(found) == 1 else f"{join_names(names)}: "
            yield f"{whose}{what if whose else what.capitalize()} on purpose (--slow-rank)."


def _resumed(record_set: RecordSet) -> Iterator[str]:
    """Say which runs resumed: their files of ranks have the steps since then only."""
    for candidate in record_set.candidates:
        for run in record_set.runs_of(candidate.name).values():
            resumed = run.events_of(ResumedEvent)
            if resumed:
                redone = sum(event.redone for event in resumed)
                again = f", {plural(redone, 'step')} done again" if redone else ""
                times = plural(len(resumed), "time")
                yield (
                    f"{candidate.name} resumed {times}, last at step {whole(run.first_step)}{again}; "
                    "its figures of single ranks and its time split are of the steps since then."
                )


def _without_graphs(record_set: RecordSet) -> Iterator[str]:
    """Say which candidates were trained without CUDA graphs, and why. Expected ones matter if others had graphs."""
    decisions = {
        candidate.name: [
            event for run in record_set.runs_of(candidate.name).values() for event in run.events_of(CudaGraphEvent)
        ]
        for candidate in record_set.candidates
    }
    for name, events in decisions.items():
        reasons = dict.fromkeys(event.reason for event in events if not event.used and not event.is_expected)
        if reasons:
            yield f"{name} was trained without CUDA graphs: {' '.join(reasons)}"
        partly = dict.fromkeys(event.reason for event in events if event.used and event.reason)
        if partly:
            yield f"{name} was trained with CUDA graphs in some steps only: {' '.join(partly)}"
    expected = [name for name, events in decisions.items() if any(event.is_expected for event in events)]
    if expected and any(event.used for events in decisions.values() for event in events):
        were = "was" if len(expected) == 1 else "were"
        yield (
            f"{join_names(expected)} {were} trained without CUDA graphs, which the strategy or the settings rule out, "
            "the others with them. --cuda-graph off compares all without graphs."
        )


def untracked_traffic(name: str, summary: Summary | None) -> str | None:
    """Return a warning if a run communicated outside the timed process groups; otherwise None."""
    untracked = summary.untracked if summary else None
    groups, operations = (untracked.groups, untracked.operations) if untracked else (0, 0)
    if groups:
        return (
            f"{name} created {plural(groups, 'process group')} outside Paceline, whose traffic is not in the time "
            "split. Create groups with comm.subgroup(ranks) to include it."
        )
    if operations:
        return (
            f"{name} ran {operations} operations on process groups other than the run's, such as torch's default "
            "group; they are not in the time split. Use comm.group to include them."
        )
    return None


def unplanned_bytes(name: str, run: RunRecord) -> str | None:
    """Return a warning if the bytes counted at a run's sockets differ from those expected; otherwise None."""
    payload = payload_of(run)
    pair = None if payload is None or payload.holds is not False else payload.furthest
    if payload is None or pair is None or pair.expected_bytes is None:
        return None
    return (
        f"{name}: rank {pair.source} sent {whole(pair.bytes)} bytes per step to rank {pair.target} by the kernel's "
        f"count, but {payload.expected_from} and framing predict {whole(pair.expected_bytes)}. The strategy sends "
        "other data than expected, or uses another algorithm; check its plan before you trust byte counts."
    )


def _unplanned(record_set: RecordSet) -> Iterator[str]:
    for candidate in record_set.candidates:
        warnings = (unplanned_bytes(candidate.name, run) for run in record_set.runs_of(candidate.name).values())
        yield from list(filter(None, warnings))[:1]


def _untracked(record_set: RecordSet) -> Iterator[str]:
    for candidate in record_set.candidates:
        runs = record_set.runs_of(candidate.name).values()
        yield from list(filter(None, (untracked_traffic(candidate.name, run.summary) for run in runs)))[:1]


def replica_difference(name: str, summary: Summary | None) -> str | None:
    """Return a warning if the replica guard has found a difference between the replicas of a run; otherwise None."""
    difference = summary.replicas.difference if summary and summary.replicas else None
    if difference is None:
        return None
    advice = "" if difference.by_rounding else " Do not trust the results."
    return f"{name}: {difference_sentence(difference)}.{advice}"


def _replica_differences(record_set: RecordSet) -> Iterator[str]:
    for candidate in record_set.candidates:
        runs = record_set.runs_of(candidate.name).values()
        yield from list(filter(None, (replica_difference(candidate.name, run.summary) for run in runs)))[:1]


def _drifts(record_set: RecordSet) -> Iterator[str]:
    """Yield warnings on replicas that differ although the strategy is lossless."""
    for candidate in record_set.candidates:
        if candidate.role == "candidate" and candidate.lossless:
            runs = record_set.runs_of(candidate.name).values()
            divergence = largest_drift(run.summary for run in runs if run.summary)
            if divergence > DRIFT:
                share = percent(divergence, 0) if divergence >= 0.01 else percent(divergence, 4)
                yield (
                    f"{candidate.name}: weights differ by {share} between ranks at the end of the run, although the "
                    "strategy is declared lossless. Its gradient synchronisation is probably wrong; do not trust its "
                    "results."
                )


def _divergences(record_set: RecordSet, candidates: Iterable[str]) -> Iterator[str]:
    """Yield warnings on runs that have diverged, with step and seed; not on those whose failure says so."""
    failures = events_of(record_set.events, FailureEvent)
    stopped = {event.candidate for event in failures if event.kind == DivergenceError.__name__}
    checked = all(r.run.topology.batch is not None for r in record_set.runs)
    found: dict[str, list[str]] = {}
    for name in candidates:
        runs = record_set.runs_of(name)
        diverged = [] if name in stopped else diverged_runs(runs.values())
        if diverged:
            places = join_names([one.place for one in diverged[:MOST_PLACES]])
            others = "" if len(diverged) <= MOST_PLACES else f" and {len(diverged) - MOST_PLACES} others"
            share = "" if len(runs) == 1 else f", {len(diverged)} of {len(runs)} repeats"
            cause = divergence_cause(diverged[0].divergence)
            found.setdefault(f"diverged at {places}{others}{share}: {cause}", []).append(name)
    for what, names in found.items():
        yield (
            f"{join_names(names)} {what}. Losses and accuracies leave such runs out. A lower learning rate, a longer "
            "warm-up or gradient clipping may prevent it." + ("" if checked else " Check the data for NaN first.")
            # Of an iterable and in a script, the batch of that step cannot be examined.
        )


def _stuck(record_set: RecordSet, candidates: Iterable[str]) -> Iterator[str]:
    """Yield warnings on runs that have not learnt, with their seeds; the verdict says it if none has learnt."""
    bounds = {candidate.name for candidate in record_set.candidates if candidate.role == "bound"}
    runs = {name: list(record_set.runs_of(name).values()) for name in candidates if name not in bounds}
    chance = chance_of([run for own in runs.values() for run in own])
    stuck = {name: [run for run in own if is_stuck(run, chance)] for name, own in runs.items()}
    if chance is None or all(len(stuck[name]) == len(runs[name]) for name in runs):
        return
    found: dict[str, list[str]] = {}
    for name, own in stuck.items():
        if own:
            found.setdefault(_stuck_clause(own, len(runs[name]), chance), []).append(name)
    for what, names in found.items():
        yield (
            f"{join_names(names)}: {what}. The learning rate is probably too high or too low for these runs; their "
            "accuracies are part of the figures."
        )


def _stuck_clause(stuck: Sequence[RunRecord], runs: int, chance: Chance) -> str:
    seeds = [str(run.config["seed"]) for run in stuck if run.config.get("seed") is not None]
    named = f" (seed{'s' * (len(seeds) > 1)} {join_names(seeds)})" if seeds else ""
    share = "" if runs == 1 else f" in {len(stuck)} of {runs} repeats"
    epochs = min(epochs_of(run) or 0.0 for run in stuck)
    return (
        f"the test accuracy is at chance level ({percent(chance.share, 0)}) after {short(epochs, 2)} epochs"
        f"{share}{named}"
    )


def over_subscription(run: RunRecord) -> str:
    """Return a warning if a run had more compute threads than cores; otherwise nothing."""
    phrase = sharing_in_run(run.topology, run.provenance.cpu_count)
    return f"{sharing_sentence(phrase)} {sharing_advice(run.topology)}" if phrase else ""
