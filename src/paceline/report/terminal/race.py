"""Terminal output of a race: its runs, the rules and the score; and of a leaderboard. The same as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console

from paceline.analysis.race.leaderboard import Leaderboard, LeaderboardEntry, LeaderboardGroup
from paceline.analysis.race.race import Race
from paceline.formatting import NOTHING, race_seconds, whole
from paceline.records.events import FailureEvent, events_of
from paceline.report.figures.columns import terminal_columns, text_column
from paceline.report.figures.race import RACE_FIGURES, race_run_json
from paceline.report.race_verdict import (
    format_conditions,
    format_hardware,
    format_outcome,
    format_remark,
    format_settings,
    format_task,
    leaderboard_sentences,
    race_rules,
    sentences,
)
from paceline.report.terminal.lines import print_line
from paceline.report.terminal.table import figure_table


def print_race(race: Race, console: Console) -> None:
    """Print the rules, the table of runs, the score and the warnings."""
    for rule in race_rules(race.design):
        print_line(console, f"{rule.name}: {rule.text}")
    console.print()
    if race.runs:
        labels = [
            text_column("run", [str(run.number) for run in race.runs]),
            text_column("seed", [str(run.seed) for run in race.runs]),
            text_column("result", [format_outcome(run) or "reached" for run in race.runs]),
        ]
        columns = [*labels, *terminal_columns(RACE_FIGURES, race.runs)]
        styles = [None if run.outcome == "reached" else "dim" for run in race.runs]
        console.print(figure_table(columns, console.width, styles=styles, names=3, name_side="right"))
        console.print()
    for sentence in sentences(race):
        print_line(console, sentence)
    for warning in race.comparison.warnings:
        print_line(console, f"note: {warning}")


def to_json(race: Race) -> dict[str, Any]:
    """Return the whole result of a race as JSON data."""
    return {
        "records": race.record_set.sources,
        "kind": "race",
        "rules": {rule.name: rule.text for rule in race_rules(race.design)},
        "score_s": race.score_s,
        "with_compile_score_s": race.with_compile_score_s,
        "total_score_s": race.total_score_s,
        "misses": race.misses,
        "complete": race.is_complete,
        "runs": [race_run_json(run) for run in race.runs],
        "verdict": list(sentences(race)),
        "interrupted": race.comparison.interrupted,
        "warnings": race.comparison.warnings,
        "failures": msgspec.to_builtins(events_of(race.record_set.events, FailureEvent)),
        "design": msgspec.to_builtins(race.design),
    }


def print_leaderboard(found: Leaderboard, console: Console) -> None:
    """Print a table for each group of races that can be compared."""
    for group in found.groups:
        print_line(console, format_task(group.task))
        print_line(console, f"on {format_hardware(group.hardware)}")
        columns = [
            text_column("place", [NOTHING if one.place is None else str(one.place) for one in group.entries]),
            text_column("race", [str(one.path) for one in group.entries]),
            text_column("training", [race_seconds(one.race.score_s) for one in group.entries], 10),
            *_compile_column(group),
            text_column("total", [race_seconds(one.race.total_score_s) for one in group.entries], 9),
            text_column("runs", [str(len(one.race.counted)) for one in group.entries], 8),
            text_column("missed", [str(one.race.misses) for one in group.entries], 7),
            text_column("strategy", [one.strategy for one in group.entries], 6),
            text_column("batch", [NOTHING if one.batch is None else whole(one.batch) for one in group.entries], 5),
            text_column("measured", [one.provenance.time[:10] for one in group.entries], 2),
        ]
        console.print(figure_table(columns, console.width, names=2))
        for one in group.entries:
            settings = format_settings(one.differing, ("strategy", "batch"))
            about = [format_remark(one), settings, format_conditions(one)]
            if any(about):
                print_line(console, f"  {one.path}: {'; '.join(filter(None, about))}")
        console.print()
    for sentence in leaderboard_sentences(found):
        print_line(console, sentence)
    for warning in found.warnings:
        print_line(console, f"note: {warning}")


def _compile_column(group: LeaderboardGroup) -> list[Any]:
    times = [one.race.with_compile_score_s for one in group.entries]
    return (
        [] if all(time is None for time in times) else [text_column("+ compiling", [race_seconds(t) for t in times], 9)]
    )


def leaderboard_json(found: Leaderboard) -> dict[str, Any]:
    """Return a leaderboard as JSON data."""
    return {
        "kind": "leaderboard",
        "groups": [
            {
                "task": vars_of(group.task),
                "hardware": vars_of(group.hardware),
                "races": [_entry_json(one) for one in group.entries],
            }
            for group in found.groups
        ],
        "verdict": leaderboard_sentences(found),
        "warnings": found.warnings,
    }


def vars_of(value: Any) -> dict[str, Any]:
    """Return the fields of a task or of hardware."""
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def _entry_json(one: LeaderboardEntry) -> dict[str, Any]:
    return {
        "place": one.place,
        "record": str(one.path),
        "score_s": one.race.score_s,
        "with_compile_score_s": one.race.with_compile_score_s,
        "total_score_s": one.race.total_score_s,
        "runs": len(one.race.counted),
        "misses": one.race.misses,
        "complete": one.race.is_complete,
        "strategy": one.strategy,
        "batch": one.batch,
        "differing": msgspec.to_builtins(one.differing),
        "software": one.software,
        "other_load": None if one.load is None else asdict(one.load),
        "provenance": msgspec.to_builtins(one.provenance),
    }
