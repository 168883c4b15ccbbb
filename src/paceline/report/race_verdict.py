"""Sentences on a race and on a leaderboard: the score, the rules under which it was measured, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from paceline.analysis.other_load import format_load
from paceline.analysis.race.leaderboard import Leaderboard, LeaderboardEntry, RaceHardware, RaceTask
from paceline.analysis.race.race import Race
from paceline.analysis.race.runs import RaceRun
from paceline.analysis.race.scores import LEAST_RUNS
from paceline.config.run import EPOCH
from paceline.formatting import plural, race_seconds, short
from paceline.records.experiment.design import RaceDesign

SHOWN_PARTS = 3
"""Parts of the start-up that the terminal and the page name."""


class Rule(NamedTuple):
    """One rule of a race."""

    name: str
    text: str


TEST_AUGMENTATIONS = {
    "none": "none",
    "mirror": "mirror: the mean of the outputs for an image and for its mirror image is tested",
    "mirror+shift": "mirror+shift: the mean of the outputs for an image, for its mirror image, and for both of them "
    "shifted by a pixel in two directions is tested",
}


def format_accuracy(share: float) -> str:
    """Format a target accuracy without trailing zeros, as in 94% or 99.25%."""
    return f"{short(100 * share)}%"


def race_rules(design: RaceDesign) -> list[Rule]:
    """Return the rules of a race, as the terminal, the page and JSON show them."""
    interval = "epoch" if design.eval_every == EPOCH else plural(int(design.eval_every), "step")
    seeds = f"{design.seed} to {design.seed + design.repeats - 1}" if design.repeats > 1 else str(design.seed)
    return [
        Rule("target", f"{format_accuracy(design.target_accuracy)} test accuracy"),
        Rule(
            "training time",
            "from the first step to the end of the step whose evaluation reached the target; evaluations are left out",
        ),
        Rule(
            "total time",
            "from the launch of the ranks to the end of that evaluation: with start-up, compiling and evaluations",
        ),
        Rule("compiling", "not in the training time; shown beside it where the model is compiled"),
        Rule("evaluation", f"after every {interval}, of the synchronised weights on all test data"),
        Rule("test-time augmentation", TEST_AUGMENTATIONS.get(design.tta, design.tta)),
        Rule("runs", f"{design.repeats}, seeds {seeds}; a run that ends without reaching the target is a miss"),
        Rule(
            "score",
            f"mean without the fastest and the slowest run, from {LEAST_RUNS} runs on; a miss counts as slowest, and "
            "two misses give no score",
        ),
    ]


def headline(race: Race) -> str:
    """Return the result of a race in one sentence."""
    target, counted = format_accuracy(race.design.target_accuracy), race.counted
    if not counted:
        return "No run has ended yet."
    if race.score_s is None:
        return f"No score: {race.misses} of {plural(len(counted), 'run')} missed the target of {target}."
    total = "" if race.total_score_s is None else f", {race_seconds(race.total_score_s)} in total"
    how = _how(len(counted), race.misses, "each" if total else "it")
    return f"{target} in {race_seconds(race.score_s)} of training{total}: {how}."


def _how(runs: int, misses: int, subject: str) -> str:
    """Describe the runs that a score is the mean of; `subject` is the word for one time, or for each of two."""
    if runs < LEAST_RUNS:
        only = "the time of the only run" if runs == 1 else f"the mean of {runs} runs"
        return f"{subject} is {only}; from {LEAST_RUNS} runs on, the fastest and the slowest are left out"
    if misses and runs == LEAST_RUNS:
        return f"{subject} is the slower of the 2 runs that reached it; the other missed, and counts as the slowest"
    if misses:
        missed = "the one that missed, which counts as the slowest"
        return f"{subject} is the mean of {runs - 2} of {runs} runs, without the fastest and {missed}"
    rest = f"middle one of {runs} runs" if runs == LEAST_RUNS else f"mean of {runs - 2} of {runs} runs"
    return f"{subject} is the {rest}, without the fastest and the slowest"


def sentences(race: Race) -> Iterator[str]:
    """Yield the sentences on a race, the result first."""
    yield headline(race)
    if race.with_compile_score_s is not None:
        yield f"With compiling, the training time is {race_seconds(race.with_compile_score_s)}."
    start_up = _start_up_sentence(race)
    if start_up:
        yield start_up
    if race.counted and not race.is_complete:
        done = f"{len(race.counted)} of {plural(race.planned, 'run')}"
        yield f"The race is not complete: {done} have ended. It has no place on a leaderboard yet."


def _start_up_sentence(race: Race) -> str:
    """Return the mean time of the start-up and its longest parts; empty if parts were not recorded."""
    runs = [run for run in race.counted if run.start_up_s is not None and run.start_up_parts_s]
    if not runs:
        return ""
    total_s = fmean(run.start_up_s or 0.0 for run in runs)
    means = {part: fmean(run.start_up_parts_s.get(part, 0.0) for run in runs) for part in runs[0].start_up_parts_s}
    longest = sorted(means, key=lambda part: means[part], reverse=True)[:SHOWN_PARTS]
    parts = ", ".join(f"{part} {race_seconds(means[part])}" for part in longest)
    return f"The start-up took {race_seconds(total_s)} on average; its longest parts: {parts}."


def format_outcome(run: RaceRun) -> str:
    """Format the end of a run for a table."""
    return {"reached": "", "missed": "missed", "diverged": "missed: diverged", "unfinished": "unfinished"}[run.outcome]


def format_run(run: RaceRun, target: float) -> str:
    """Describe the result of one run in a line."""
    if run.outcome != "reached" or run.train_s is None:
        best = "" if run.accuracy is None else f", best accuracy {format_accuracy(round(run.accuracy, 4))}"
        return f"{format_outcome(run)}{best}, {race_seconds(run.trained_s)} of training"
    total = "" if run.total_s is None else f", {race_seconds(run.total_s)} in total"
    return f"{format_accuracy(target)} in {race_seconds(run.train_s)} of training{total}"


def format_task(task: RaceTask) -> str:
    """Describe the task of a group of races."""
    data = f" on {task.data}" if task.data else ""
    tta = "" if task.tta == "none" else f", test-time augmentation {task.tta}"
    return f"{task.workload}{data} to {format_accuracy(task.target)}{tta}"


def format_hardware(hardware: RaceHardware) -> str:
    """Describe the hardware of a group of races."""
    cpu = hardware.cpu or "unknown processor"
    cores = f", {plural(hardware.cores, 'core')}" if hardware.cores else ""
    machine = f"{cpu}{cores}" if hardware.device == "cpu" else f"{hardware.device} ({cpu}{cores})"
    hosts = f" on {plural(hardware.hosts, 'host')}" if hardware.hosts > 1 else ""
    emulated = f", emulated as {hardware.emulated}" if hardware.emulated else ""
    return f"{machine}, {plural(hardware.ranks, 'rank')}{hosts}{emulated}"


def leaderboard_sentences(found: Leaderboard) -> list[str]:
    """Return the sentences on what a leaderboard compares."""
    if len(found.groups) == 1:
        return ["All races have the same task and the same hardware.", *_condition_sentences(found)]
    hardware = {group.hardware for group in found.groups}
    return [
        f"{len(found.groups)} groups: places count only among races of the same task on the same hardware.",
        *(["Times of different hardware are not compared."] if len(hardware) > 1 else []),
        *_condition_sentences(found),
    ]


def _condition_sentences(found: Leaderboard) -> Iterator[str]:
    """Say what else than the settings may explain the order of races."""
    several = [entry for group in found.groups if len(group.entries) > 1 for entry in group.entries]
    if any(entry.load is not None and entry.load.is_notable for entry in several):
        yield "Other programs used cores during some races, which makes their times longer."
    if any(entry.software for entry in several):
        yield "Some races of a group were measured with other versions of the software."


def format_conditions(entry: LeaderboardEntry) -> str:
    """Say under what conditions a race was measured, as far as they may have changed its times; empty for none."""
    load = entry.load
    parts = [f"{name} {version}" for name, version in entry.software.items()]
    if load is not None and load.is_notable:
        parts.insert(0, f"other programs used {format_load(load)}")
    return ", ".join(parts)


def format_remark(entry: LeaderboardEntry) -> str:
    """Say why a race has no place, or that its score is that of few runs; empty for others."""
    race = entry.race
    if not race.is_complete:
        return f"unfinished: {len(race.counted)} of {plural(race.planned, 'run')}"
    if race.score_s is None:
        return f"no score: {race.misses} of {len(race.counted)} missed"
    few = plural(len(race.counted), "run")
    return f"only {few}, so none is left out of the score" if len(race.counted) < LEAST_RUNS else ""


def format_settings(differing: dict[str, Any] | None, most: Sequence[str] = ()) -> str:
    """Format the settings that distinguish a race from the others of its group, without those in `most`."""
    return " ".join(f"{name}={_value(value)}" for name, value in (differing or {}).items() if name not in most)


def _value(value: Any) -> str:
    if value is None or value == "":
        return "default"
    return str(value).lower() if isinstance(value, bool) else short(value) if isinstance(value, float) else str(value)
