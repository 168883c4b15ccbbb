"""Verdict of a comparison: a few sentences, each with the figures that support it, and the next command."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.ranks import RankRow
from paceline.analysis.statistics import Estimate
from paceline.analysis.traffic.payload import Payload, RankBytes
from paceline.config import LENGTH_SETTINGS, RunConfig
from paceline.config.setting import select
from paceline.formatting import (
    ACCURACY,
    FACTOR,
    confidence,
    factor,
    interval,
    join_names,
    percent,
    plural,
    seconds,
    size,
)
from paceline.records.experiment import Design

OMITTED_SETTINGS = frozenset(select(RunConfig, lambda metadata: metadata.positional or not metadata.in_next_command))
"""Settings left out of a suggested command: it names the workload elsewhere, and the others were for one run only."""
NOTABLE_IMBALANCE = 1.5
"""Ratio of a rank's bytes to those of the next busiest rank from which the imbalance gets a sentence."""


def sentences(comparison: Comparison) -> list[str]:
    """Return the verdict: what to pick, its gain over one process, what limits it, and other notable results."""
    found = [*_one_process_advice(comparison), *_winner(comparison), *_lossless_alternative(comparison)]
    found += [*_gain_over_one_process(comparison), *_imbalance(comparison), *_accuracy(comparison)]
    if comparison.interrupted:
        found.append("This comparison was interrupted: it covers only the runs that had finished by then.")
    return found


def _one_process_advice(comparison: Comparison) -> Iterator[str]:
    """Yield the advice to train in one process, where that is faster than every strategy."""
    baseline = comparison.over_one_process()
    if baseline is None or comparison.pick != baseline[0].candidate.name:
        return
    row, gain = baseline
    assert comparison.decision.first is not None
    best = comparison.row(comparison.decision.first)
    assert row.step_s is not None
    cost = _communication_cost(best, f"{best.candidate.name}'s")
    because = "" if cost is None else f"; {cost}"
    yield (
        f"Train in one process: {seconds(row.step_s.value)} per step, {factor(1 / gain.value)} as fast as "
        f"{comparison.decision.first} on {plural(best.workers or 1, 'rank')}{because}."
    )


def _winner(comparison: Comparison) -> Iterator[str]:
    """Yield which distributed strategy is fastest, as far as that is certain."""
    decision = comparison.decision
    pick = "Pick" if comparison.pick in (None, decision.first) else "Of the distributed strategies, pick"
    if decision.first is None:
        yield "No candidate was timed, so there is none to pick."
        return
    first = comparison.row(decision.first)
    assert first.step_s is not None
    if decision.second is None:
        yield f"{decision.first} takes {seconds(first.step_s.value)} per step; there is nothing to compare it with."
        return
    assert decision.ratio is not None
    assert decision.level is not None
    ratio, repeats = decision.ratio, plural(decision.ratio.repeats, "repeat")
    certainty = _interval_and_repeats(ratio, decision.level)
    if decision.outcome == "winner":
        yield (
            f"{pick} {decision.first}: {seconds(first.step_s.value)} per step, {factor(ratio.value)} as fast as "
            f"{decision.second}, the next best{certainty}."
        )
    elif decision.outcome == "equal":
        yield (
            f"{decision.first} and {decision.second} are equally fast: {seconds(first.step_s.value)} per step, "
            f"a ratio of {factor(ratio.value)}{certainty}."
        )
    elif ratio.repeats == 0:
        yield (
            f"{decision.first} was {factor(ratio.value)} as fast as {decision.second}, but they were measured in "
            "separate experiments, so the machine may have caused the difference. Compare them in one experiment."
        )
    elif ratio.low is None:
        yield (
            f"{decision.first} was {factor(ratio.value)} as fast as {decision.second} in {repeats}, "
            "too few to decide which is faster."
        )
    else:
        yield (
            f"No clear winner: {decision.second} takes {factor(ratio.value)} the time of {decision.first}, but the "
            f"interval ({interval(ratio.low, ratio.high, FACTOR)}, {repeats}) includes equal speed (differences below "
            "1% count as none). More repeats or longer runs may decide it."
        )


def _lossless_alternative(comparison: Comparison) -> Iterator[str]:
    """Yield a warning where the fastest strategy is not lossless, and the fastest one that is."""
    first = comparison.decision.first
    if first is None or comparison.row(first).candidate.lossless:
        return
    yield f"{first} does not train with the mean gradient: its speed counts only if its losses are as good."
    exact = next((row for row in comparison.with_role("candidate") if row.candidate.lossless), None)
    if exact is not None and exact.step_s is not None:
        times = comparison.speed_up(first, exact.candidate.name)
        ratio = "" if times is None else f", {factor(times.value)} the time of {first}{_format_interval(times)}"
        name, step_s = exact.candidate.name, seconds(exact.step_s.value)
        yield f"The fastest that trains with the mean gradient is {name}: {step_s} per step{ratio}."


def _gain_over_one_process(comparison: Comparison) -> Iterator[str]:
    """Yield the gain of the best candidate over one process, and what its communication costs."""
    if comparison.decision.first is None:
        return
    best, baseline = comparison.row(comparison.decision.first), comparison.over_one_process()
    cost = _communication_cost(best, "its")
    if baseline is not None:
        gain = baseline[1]
        ranks = f"{best.candidate.name} on {plural(best.workers or 1, 'rank')}"
        because = f"; {cost}." if cost else "."
        if gain.low is None:
            measured = f"{factor(gain.value)} as fast as one process in {plural(gain.repeats, 'repeat')}"
            yield f"{ranks} was {measured}, too few to decide which is faster{because}"
        elif gain.spans(1):
            ratio = f"{factor(gain.value)} as fast{_format_interval(gain)}"
            yield f"{ranks} shows no measurable difference in speed from one process: {ratio}{because}"
        elif gain.value > 1:
            yield f"{ranks} is {factor(gain.value)} as fast as one process{_format_interval(gain)}{because}"
    elif best.above_bound is not None and best.above_bound.value > 0:
        most = _without_exchange(best.above_bound.value, "its")
        yield f"{best.candidate.name}: {most}; no other strategy can gain more than that."
    elif cost:
        yield f"{best.candidate.name}: {cost}."


def _communication_cost(row: CandidateRow, whose: str) -> str | None:
    """Return the share of a step lost to communication, as a clause; None where it is zero or unknown.

    Exposed communication was observed directly. The difference to the bound can be larger, since communication also
    takes cores from computing, or smaller, since the ranks of a bound never wait for each other.
    """
    if row.exposed is not None:
        share = row.exposed.value
        return f"{percent(share, 0)} of {whose} step is exposed communication" if share > 0 else None
    if row.above_bound is not None and row.above_bound.value > 0:
        return _without_exchange(row.above_bound.value, whose)
    return None


def _without_exchange(share: float, whose: str) -> str:
    return f"{whose} step would be {percent(share, 0)} shorter if nothing were exchanged"


def _imbalance(comparison: Comparison) -> Iterator[str]:
    """Yield ranks that carry much more traffic than others, and the slowest candidate."""
    candidates = comparison.with_role("candidate")
    for imbalance, names in _imbalances(candidates, comparison.payloads).items():
        yield f"{join_names(names)}: {imbalance}."
    if len(candidates) < 3:
        return
    best, last = candidates[0], candidates[-1]
    times = comparison.speed_up(best.candidate.name, last.candidate.name)
    if times is not None and times.low is not None and times.low > 1:
        sent = last.busiest_sent_bytes
        sends = "" if not sent else f"; its busiest rank sends {size(sent)} per step"
        ratio = f"{factor(times.value)} the time of {best.candidate.name}{_format_interval(times)}"
        yield f"{last.candidate.name} is the slowest: {ratio}{sends}."


def _imbalances(rows: Sequence[CandidateRow], payloads: Mapping[str, Payload]) -> dict[str, list[str]]:
    """Return a clause for each rank that moves notably more bytes than any other, with the candidates it applies to.

    Bytes are those the kernel counted, where it did, else those of the plan.
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        payload = payloads.get(row.candidate.name)
        ranks: Sequence[RankRow | RankBytes] = row.ranks if payload is None else payload.ranks
        moved = sorted(((r.sent_bytes or 0) + (r.received_bytes or 0), r.rank) for r in ranks)
        if len(moved) > 1 and moved[-2][0] and moved[-1][0] >= NOTABLE_IMBALANCE * moved[-2][0]:
            (next_most, _), (most, rank) = moved[-2:]
            counted = "" if payload is None else f" ({size(most)} per step, measured at its sockets)"
            clause = f"rank {rank} sends and receives {factor(most / next_most)} the bytes of any other rank{counted}"
            found.setdefault(clause, []).append(row.candidate.name)
    return found


def _accuracy(comparison: Comparison) -> Iterator[str]:
    """Yield differences in test accuracy that exceed the spread between seeds, or that all are at chance level."""
    rows = [row for row in comparison.rows if row.test_accuracy is not None and row.candidate.role != "bound"]
    if not rows:
        return
    chance = _chance(comparison)
    if chance is not None and all(row.test_accuracy and row.test_accuracy.value <= chance.most for row in rows):
        yield (
            f"All test accuracies are at chance level ({percent(chance.share, 0)}): too few steps were trained to "
            "compare them. Train longer with --steps or --epochs."
        )
        return
    different = [row for row in rows if row.accuracy_gain is not None and not row.accuracy_gain.spans(0)]
    for row in different:
        gain = row.accuracy_gain
        assert gain is not None
        more = "higher" if gain.value > 0 else "lower"
        points = ACCURACY.write(abs(gain.value))
        yield (
            f"{row.candidate.name}: the test accuracy is {points} percentage points {more} than "
            f"that of {comparison.reference}, which exceeds the spread between seeds."
        )


@dataclass(frozen=True)
class Chance:
    """Accuracy of random guessing."""

    share: float
    """Expected accuracy."""
    most: float
    """Highest accuracy that guessing explains: three standard errors above the expected one."""


def _chance(comparison: Comparison) -> Chance | None:
    classes = {entry.run.topology.classes for entry in comparison.record_set.runs}
    tests = [entry.run.summary and entry.run.summary.test for entry in comparison.record_set.runs]
    samples = min((test.samples for test in tests if test and test.samples), default=0)
    known = classes.pop() if len(classes) == 1 else None
    if not known or not samples:
        return None
    share = 1 / known
    return Chance(share, share + 3 * math.sqrt(share * (1 - share) / samples))


def _format_interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({interval(estimate.low, estimate.high, FACTOR)})"


def _interval_and_repeats(estimate: Estimate, level: float) -> str:
    repeats = plural(estimate.repeats, "repeat")
    if estimate.low is None or estimate.high is None:
        return f" ({repeats})"
    return f" ({confidence(level)} interval {interval(estimate.low, estimate.high, FACTOR)}, {repeats})"


def next_command(comparison: Comparison) -> str | None:
    """Return the command to run next: train with the winner, or measure longer where there is none."""
    decision, record_set = comparison.decision, comparison.record_set
    if decision.first is None or len(record_set.designs) != 1:  # No single experiment to continue.
        return None
    ranks = record_set.designs[0].ranks
    launch = _launch_settings(record_set.designs[0])
    if comparison.pick is None and decision.outcome == "undecided":
        config = dict(record_set.config) | _longer_run(record_set.config)
        fastest = [comparison.row(name).candidate for name in _fastest_two(comparison)]
        apart = fastest[0].settings != fastest[-1].settings  # Then `--vary` runs every strategy under every setting.
        strategies = [candidate.strategy for candidate in fastest]
        names = ",".join(dict.fromkeys(strategies) if apart else strategies)
        extra = {
            "strategies": names,
            **launch,
            "max_repeats": 2 * record_set.designs[0].max_repeats,
        }
        return _command("compare", config, extra, _vary_options(comparison))
    winner = comparison.row(comparison.pick or decision.first).candidate
    if "script" in record_set.config:
        alone = winner.role == "baseline"
        start = ["python"] if alone else ["torchrun", "--nproc-per-node", str(ranks)]
        command = shlex.join([*start, record_set.config["script"], *record_set.config["args"]])
        return f'{command}  # with paceline.attach(model, make_optimizer, "{winner.strategy}")'
    config = dict(record_set.config) | winner.settings | dict.fromkeys(LENGTH_SETTINGS)
    config["epochs"] = max(3, record_set.config.get("epochs") or 0)
    return _command("train", config, {"strategy": winner.strategy, **launch})


def _launch_settings(design: Design) -> dict[str, Any]:
    """Return the options that start the same ranks on the same hosts; real hosts each need their own `--node-rank`."""
    settings = {"ranks": design.ranks, "threads": design.requested_threads}
    if design.emulated:
        return settings | {"emulate": design.emulated, "host_cpus": design.host_cpus}
    if design.hosts > 1:
        return settings | {"hosts": design.hosts, "node_rank": "R", "master": "ADDRESS:PORT"}
    return settings


def _longer_run(config: dict[str, Any]) -> dict[str, float]:
    """Return the setting of a longer run, whose result is more certain."""
    if config.get("steps"):
        return {"steps": 4 * config["steps"]}
    if config.get("seconds") and not config.get("epochs"):
        return {"seconds": 2 * config["seconds"]}
    return {"epochs": 2 * (config.get("epochs") or 1)}


def _fastest_two(comparison: Comparison) -> list[str]:
    return [name for name in (comparison.decision.first, comparison.decision.second) if name is not None]


def _vary_options(comparison: Comparison) -> list[str]:
    """Return the `--vary` options that reproduce the settings of the two fastest candidates."""
    fastest = [comparison.row(name).candidate.settings for name in _fastest_two(comparison)]
    keys = [key for key in fastest[0] if all(key in settings for settings in fastest)]
    return [f"{key}={','.join(dict.fromkeys(_format_option(s[key]) for s in fastest))}" for key in keys]


def _format_option(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command(verb: str, config: dict[str, Any], extra: dict[str, Any], vary: Sequence[str] = ()) -> str:
    """Return a command line with the settings that differ from the defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    words = ["paceline", verb]
    if "script" in config:
        words += ["--script", config["script"]]
    elif config.get("workload", defaults["workload"]) != defaults["workload"]:
        words.append(config["workload"])
    settings = {k: v for k, v in config.items() if k not in OMITTED_SETTINGS and k in defaults and v != defaults[k]}
    for key, value in (settings | extra).items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", str(value)]
    words += [word for setting in vary for word in ("--vary", setting)]
    return shlex.join([*words, *(["--", *config["args"]] if config.get("args") else [])])


def train_command(config: Mapping[str, Any], design: Design, settings: Mapping[str, Any]) -> str:
    """Return the command that trains with some settings on the ranks of a design, for at least three epochs."""
    own = dict(config) | dict.fromkeys(LENGTH_SETTINGS) | {"epochs": max(3, config.get("epochs") or 0)}
    own.pop("evaluate", None)  # Short runs of an experiment are not tested; training is.
    return _command("train", own, {**settings, **_launch_settings(design)})
