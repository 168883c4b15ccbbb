"""The answer in a few plain sentences, each with the number of the table that it rests on."""

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
from paceline.config import RunConfig
from paceline.report.formatting import factor, listed, percent, plural, seconds, size

NOT_REPEATED = frozenset({"workload", "trace", "profile", "tensorboard"})
"""Settings that a suggested command does not take over: what stands elsewhere in it, and looks that were taken once."""
NOTABLE_IMBALANCE = 1.5
"""From how many times the bytes of another rank a rank's burden is worth a sentence."""
GOES_AWAY = "goes away when nothing is exchanged"
"""What a share above the bound is, in words: not all of it is communication."""


def sentences(comparison: Comparison) -> list[str]:
    """What to pick, what it gains over one process, what limits it, and what else stands out."""
    found = [*_one_process(comparison), *_winner(comparison), *_exact(comparison), *_distributing(comparison)]
    found += [*_burden(comparison), *_quality(comparison)]
    if comparison.interrupted:
        found.append("This comparison was interrupted: it tells what was measured until then.")
    return found


def _one_process(comparison: Comparison) -> Iterator[str]:
    """Where sharing the work does not pay, that comes first."""
    baseline = comparison.over_one_process()
    if baseline is None or comparison.pick != baseline[0].candidate.name:
        return
    row, gain = baseline
    assert comparison.decision.first is not None
    best = comparison.row(comparison.decision.first)
    assert row.step_s is not None
    price = _price(best)
    because = "" if price is None else f", {price[0]} of whose step {price[1]}"
    yield (
        f"Train in one process: {seconds(row.step_s.value)} per step, {factor(1 / gain.value)} as fast as "
        f"{comparison.decision.first} on {plural(best.workers or 1, 'rank')}{because}."
    )


def _winner(comparison: Comparison) -> Iterator[str]:
    """What is the fastest of those that share the work."""
    decision = comparison.decision
    pick = "Pick" if comparison.pick in (None, decision.first) else "Of those that share the work, pick"
    if decision.first is None:
        yield "Nothing that could be picked was measured."
        return
    first = comparison.row(decision.first)
    assert first.step_s is not None
    if decision.second is None:
        yield f"{decision.first} takes {seconds(first.step_s.value)} per step; there is nothing to compare it with."
        return
    assert decision.ratio is not None
    ratio, repeats = decision.ratio, plural(decision.ratio.repeats, "repeat")
    apart = _range(ratio)
    if decision.outcome == "winner":
        yield (
            f"{pick} {decision.first}: {seconds(first.step_s.value)} per step, {factor(ratio.value)} as fast as "
            f"{decision.second}, the next best{apart}, over {repeats}."
        )
    elif decision.outcome == "equal":
        yield (
            f"{decision.first} and {decision.second} are equally fast: {seconds(first.step_s.value)} per step, "
            f"a ratio of {factor(ratio.value)}{apart}, over {repeats}."
        )
    elif ratio.repeats == 0:
        yield (
            f"{decision.first} was {factor(ratio.value)} as fast as {decision.second}, but they were not measured "
            "together, so the machine may have made the difference."
        )
    elif ratio.low is None:
        yield (
            f"{decision.first} was {factor(ratio.value)} as fast as {decision.second} in {repeats}, "
            "which is too little to call it the faster one."
        )
    else:
        yield (
            f"No clear winner: {decision.second} takes {factor(ratio.value)} the time of {decision.first}{apart}, "
            f"and after {repeats} a tie, within 1%, cannot be ruled out."
        )


def _exact(comparison: Comparison) -> Iterator[str]:
    """Where the fastest does not give the mean gradient: what it has to be held against, and the fastest that does."""
    first = comparison.decision.first
    if first is None or comparison.row(first).candidate.lossless:
        return
    yield f"{first} does not train by the mean gradient: it is worth its speed only where its losses are as good."
    exact = next((row for row in comparison.with_role("candidate") if row.candidate.lossless), None)
    if exact is not None and exact.step_s is not None:
        times = comparison.speed_up(first, exact.candidate.name)
        apart = "" if times is None else f", {factor(times.value)} the time{_range(times)}"
        yield f"The fastest that does is {exact.candidate.name}: {seconds(exact.step_s.value)} per step{apart}."


def _distributing(comparison: Comparison) -> Iterator[str]:
    """What the best candidate gains over one process, and how far it is from the bound."""
    if comparison.decision.first is None:
        return
    best, baseline = comparison.row(comparison.decision.first), comparison.over_one_process()
    price = _price(best)
    share = None if price is None else f"{price[0]} of its step {price[1]}"
    if baseline is not None:
        gain = baseline[1]
        ranks = f"{best.candidate.name} on {plural(best.workers or 1, 'rank')}"
        because = f"; {share}." if share else "."
        if gain.low is None:
            seen = f"{factor(gain.value)} as fast as one process in {plural(gain.repeats, 'repeat')}"
            yield f"{ranks} was {seen}, which is too little to tell them apart{because}"
        elif gain.spans(1):
            apart = f"{factor(gain.value)}{_range(gain)}"
            yield f"{ranks} cannot be told from one process in speed: {apart}{because}"
        elif gain.value > 1:
            yield f"{ranks} is {factor(gain.value)} as fast as one process{_range(gain)}{because}"
    elif best.above_bound is not None and best.above_bound.value > 0:
        most = f"{percent(best.above_bound.value, 0)} of its step {GOES_AWAY}"
        yield f"{best.candidate.name}: {most}; that is all that a better strategy could still gain."
    elif share:
        yield f"{best.candidate.name}: {share}."


def _price(row: CandidateRow) -> tuple[str, str] | None:
    """What share of a step is lost to communication, and in which sense; None where nothing is, or is known.

    Exposed communication was seen; what is above the bound is more than that, as the cores that communication takes,
    or less, since a bound has nobody to wait for.
    """
    for lost, sense in ((row.exposed, "is exposed communication"), (row.above_bound, GOES_AWAY)):
        if lost is not None:
            return (percent(lost.value, 0), sense) if lost.value > 0 else None
    return None


def _burden(comparison: Comparison) -> Iterator[str]:
    """Ranks that carry more than others; else who is last, and by how much."""
    candidates = comparison.with_role("candidate")
    for burden, names in _burdens(candidates, comparison.payloads).items():
        yield f"{listed(names)}: {burden}."
    if len(candidates) < 3:
        return
    best, last = candidates[0], candidates[-1]
    times = comparison.speed_up(best.candidate.name, last.candidate.name)
    if times is not None and times.low is not None and times.low > 1:
        sent = last.busiest_sent_bytes
        sends = "" if not sent else f"; its busiest rank sends {size(sent)} per step"
        apart = f"{factor(times.value)} the time of {best.candidate.name}{_range(times)}"
        yield f"{last.candidate.name} is the slowest: {apart}{sends}."


def _burdens(rows: Sequence[CandidateRow], payloads: Mapping[str, Payload]) -> dict[str, list[str]]:
    """Ranks that move notably more bytes than any other, in words, and the candidates that have one.

    By the kernel's count where there is one, else by the plan.
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        payload = payloads.get(row.candidate.name)
        ranks: Sequence[RankRow | RankBytes] = row.ranks if payload is None else payload.ranks
        moved = sorted(((r.sent_bytes or 0) + (r.received_bytes or 0), r.rank) for r in ranks)
        if len(moved) > 1 and moved[-2][0] and moved[-1][0] >= NOTABLE_IMBALANCE * moved[-2][0]:
            (next_most, _), (most, rank) = moved[-2:]
            counted = "" if payload is None else f": {size(most)} per step, measured at its sockets"
            words = f"rank {rank} moves {most / next_most:.1f}× the bytes of any other rank{counted}"
            found.setdefault(words, []).append(row.candidate.name)
    return found


def _quality(comparison: Comparison) -> Iterator[str]:
    """Accuracies, judged against the spread between seeds and against chance."""
    rows = [row for row in comparison.rows if row.test_accuracy is not None and row.candidate.role != "bound"]
    if not rows:
        return
    chance = _chance(comparison)
    if chance is not None and all(row.test_accuracy and row.test_accuracy.value <= chance.most for row in rows):
        yield (
            f"Test accuracies are those of guessing ({percent(chance.share, 0)}): "
            "too few steps were trained to compare them."
        )
        return
    different = [row for row in rows if row.accuracy_gain is not None and not row.accuracy_gain.spans(0)]
    for row in different:
        gain = row.accuracy_gain
        assert gain is not None
        more = "higher" if gain.value > 0 else "lower"
        yield (
            f"{row.candidate.name}: the test accuracy is {abs(100 * gain.value):.1f} percentage points {more} than "
            f"that of {comparison.reference}, beyond the spread between seeds."
        )


@dataclass(frozen=True)
class Chance:
    """What guessing gives: the share that is right on average, and the most that luck explains."""

    share: float
    most: float


def _chance(comparison: Comparison) -> Chance | None:
    classes = {entry.run.topology.get("classes") for entry in comparison.record_set.runs}
    tests = [(entry.run.summary or {}).get("test") or {} for entry in comparison.record_set.runs]
    samples = min((test["samples"] for test in tests if test.get("samples")), default=0)
    known = classes.pop() if len(classes) == 1 else None
    if not known or not samples:
        return None
    share = 1 / known
    return Chance(share, share + 3 * math.sqrt(share * (1 - share) / samples))  # Three standard errors.


def _range(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({estimate.low:.2f}–{estimate.high:.2f})"


def next_command(comparison: Comparison) -> str | None:
    """What to type next: train with the winner, or measure longer where there is none."""
    decision, record_set = comparison.decision, comparison.record_set
    if decision.first is None or len(record_set.designs) != 1:  # Of several experiments none says how to go on.
        return None
    ranks = record_set.designs[0]["ranks"]
    start_with = _launch_settings(record_set.designs[0])
    if comparison.pick is None and decision.outcome == "undecided":
        config = dict(record_set.config) | _longer(record_set.config)
        leaders = [comparison.row(name).candidate for name in _leaders(comparison)]
        apart = leaders[0].settings != leaders[-1].settings  # Then each strategy takes every setting's turn.
        strategies = [leader.strategy for leader in leaders]
        names = ",".join(dict.fromkeys(strategies) if apart else strategies)
        extra = {
            "strategies": names,
            **start_with,
            "max_repeats": 2 * record_set.designs[0]["max_repeats"],
        }
        return _command("compare", config, extra, _varied(comparison))
    winner = comparison.row(comparison.pick or decision.first).candidate
    if "script" in record_set.config:
        alone = winner.role == "baseline"
        start = ["python"] if alone else ["torchrun", "--nproc-per-node", str(ranks)]
        command = shlex.join([*start, record_set.config["script"], *record_set.config["args"]])
        return f'{command}  # with paceline.attach(model, make_optimizer, "{winner.strategy}")'
    config = dict(record_set.config) | winner.settings | {"steps": None, "seconds": None}
    config["epochs"] = max(3, record_set.config.get("epochs") or 0)
    return _command("train", config, {"strategy": winner.strategy, **start_with})


def _launch_settings(design: dict[str, Any]) -> dict[str, Any]:
    """What starts the same ranks on the same hosts; of real ones each is started with its own number."""
    settings = {"ranks": design["ranks"], "threads": design.get("requested_threads")}
    if design.get("emulated"):
        return settings | {"emulate": design["emulated"], "host_cpus": design.get("host_cpus")}
    if (design.get("hosts") or 1) > 1:
        return settings | {"hosts": design["hosts"], "node_rank": "R", "master": "ADDRESS:PORT"}
    return settings


def _longer(config: dict[str, Any]) -> dict[str, float]:
    """The length of a run that tells more."""
    if config.get("steps"):
        return {"steps": 4 * config["steps"]}
    if config.get("seconds") and not config.get("epochs"):
        return {"seconds": 2 * config["seconds"]}
    return {"epochs": 2 * (config.get("epochs") or 1)}


def _leaders(comparison: Comparison) -> list[str]:
    return [name for name in (comparison.decision.first, comparison.decision.second) if name is not None]


def _varied(comparison: Comparison) -> list[str]:
    """The `--vary` options that bring the leaders' settings back."""
    leaders = [comparison.row(name).candidate.settings for name in _leaders(comparison)]
    keys = [key for key in leaders[0] if all(key in settings for settings in leaders)]
    return [f"{key}={','.join(dict.fromkeys(_written(s[key]) for s in leaders))}" for key in keys]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command(verb: str, config: dict[str, Any], extra: dict[str, Any], vary: Sequence[str] = ()) -> str:
    """A command line with the settings that are not the defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    words = ["paceline", verb]
    if "script" in config:
        words += ["--script", config["script"]]
    elif config.get("workload", defaults["workload"]) != defaults["workload"]:
        words.append(config["workload"])
    settings = {k: v for k, v in config.items() if k not in NOT_REPEATED and k in defaults and v != defaults[k]}
    for key, value in (settings | extra).items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", str(value)]
    words += [word for setting in vary for word in ("--vary", setting)]
    return shlex.join([*words, *(["--", *config["args"]] if config.get("args") else [])])
