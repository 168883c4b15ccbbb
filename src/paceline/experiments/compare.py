"""`compare`: contenders side by side on ranks of one shape, until it is clear which is the fastest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.analysis.comparison import compare as compare_records
from paceline.analysis.pool import pool
from paceline.config import CompareConfig, LaunchConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.checks import choose_shape, place_settings, settings_of
from paceline.experiments.contenders import make_entrants, reference_of, varied_keys
from paceline.experiments.experiment import Board, Experiment
from paceline.experiments.subjects import choose_subject
from paceline.experiments.train import new_folder
from paceline.launch.fleet import join_fleet
from paceline.launch.seat import Say
from paceline.launch.seating import find_seat
from paceline.measure.cores import threads_per_rank
from paceline.records import provenance
from paceline.records.experiment import ExperimentFolder, read_experiment
from paceline.training.windows import WARM_UP_STEPS

DEFAULT_STEPS = 40


@dataclass
class Race(Experiment):
    """A comparison while it goes on: it ends when the two fastest can be told apart, or have had enough chances."""

    def enough(self, repeats: int) -> bool:
        comparison = compare_records(pool([read_experiment(self.folder.path)]))
        if self.first_error is not None and all(row.step_s is None for row in comparison.rows):
            raise self.first_error
        self.board.look(comparison, repeats)
        return repeats >= self.config.repeats and comparison.decision.outcome != "open"


def compare(
    base: RunConfig,
    launch: LaunchConfig,
    config: CompareConfig,
    out: Path | None,
    board: Board,
    tell_folder: Callable[[Path], None],
    say: Say,
    script_args: Sequence[str] = (),
) -> None:
    """Runs a whole comparison. Its folder, told as soon as it is there, holds what was done even after an interrupt.

    No folder is told on a host that only takes part: all but the first.
    """
    seat = find_seat(launch, os.environ)
    subject, base = choose_subject(base, config, script_args)
    length = ("steps", "epochs", "seconds")
    if all(getattr(base, name) is None for name in length) and not varied_keys(config) & set(length):
        base = replace(base, steps=DEFAULT_STEPS)
    shape = choose_shape(base, launch, seat)
    entrants = make_entrants(base, config, shape, subject.rules)
    too_few = [e.config.steps for e in entrants if e.config.steps is not None and e.config.steps <= WARM_UP_STEPS]
    if too_few:
        raise UsageError(
            f"--steps {too_few[0]} leaves nothing to measure: the first {WARM_UP_STEPS} steps warm up.",
            hint="use --steps 40, or leave it out",
        )
    contenders = [entrant.contender for entrant in entrants]
    subject.prepare(entrants)
    known = subject.describe(entrants, shape.ranks, config) if seat.leads else {}
    settings = settings_of("compare", launch, base, config) | {"script_args": list(script_args)}
    fleet = join_fleet(seat, launch, settings, timeout_s=base.timeout, say=say)
    if fleet is None:
        return
    design = {
        "ranks": shape.ranks,
        "hosts": shape.hosts,
        "ranks_per_host": shape.ranks_per_host,
        **place_settings(),
        "threads": launch.threads or threads_per_rank(shape.ranks_per_host),
        "threads_asked": launch.threads,
        "repeats": config.repeats,
        "max_repeats": config.max_repeats,
        "looks": config.looks,
        "reference": reference_of(contenders),
        "proof": config.proof,
        **known,
    }
    with fleet:
        folder = ExperimentFolder.create(
            out or new_folder(base, "compare"),
            kind="compare",
            contenders=contenders,
            config=subject.settings(entrants),
            design=design,
            provenance=provenance(),
        )
        tell_folder(folder.path)
        board.plan(design | {"contenders": [contender.name for contender in contenders]}, entrants[0].config)
        Race(subject, entrants, fleet, config, folder, board).run()
