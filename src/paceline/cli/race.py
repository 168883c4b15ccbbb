"""`paceline race`: measure the time to a test accuracy, and rank races on a leaderboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from paceline.cli.experiment_requests import ExperimentRequest, Measure
from paceline.cli.messages import data_console, print_json
from paceline.config import RaceConfig, RunConfig, settings_unused_by
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.report.live.live_table import LiveTable


@dataclass(frozen=True, kw_only=True)
class RaceRequest(ExperimentRequest):
    """Measure the time to a test accuracy.

    Trains one configuration several times, each time with another seed, until an evaluation reaches --target. The score
    is the mean training time without the fastest and the slowest run. Start-up and evaluations are not part of the
    training time; the total time, which includes them, is shown beside it. A run that does not reach the target is a
    miss.

    --leaderboard lists all races in a folder, ranked within the same task on the same hardware, and trains nothing.

    Ctrl-C stops the race and reports the runs measured so far. The same command with --out of that folder goes on.
    """

    command: ClassVar[str] = "race"
    without: ClassVar[frozenset[str]] = settings_unused_by("race")
    help_texts: ClassVar[Mapping[str, str]] = {
        "epochs": "Epochs after which a run has missed the target, and for which the learning rate is scheduled "
        "[default: 20, unless --steps or --seconds is given].",
        "steps": "Steps after which a run has missed the target.",
        "seconds": "Seconds of training after which a run has missed the target.",
        "seed": "Seed of the first run; the others have the following ones.",
    }

    race: RaceConfig
    leaderboard: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only list the races in this folder and its subfolders, the best first."),
    ] = None

    def experiment(self) -> tuple[type[LiveTable], Measure]:
        from paceline.experiments.race import race
        from paceline.report.live.race_table import RaceLiveTable

        _ = self.race.target_accuracy  # Raises before torch is imported if there is none.
        return RaceLiveTable, partial(race, self.run, self.launch, self.race, self.out)

    def carry_out(self) -> int:
        if self.leaderboard is None:
            return super().carry_out()
        if (self.run, self.race, self.out) != (RunConfig(), RaceConfig(), None):
            raise UsageError(
                "--leaderboard lists races and trains nothing, but other options were given.",
                hint="leave the other options out; only --json goes with it",
            )
        _show_leaderboard(self.leaderboard, as_json=self.as_json)
        return 0


def _show_leaderboard(folder: Path, *, as_json: bool) -> None:
    """Print the leaderboard of a folder, as tables or as JSON."""
    from paceline.analysis.race.leaderboard import read_leaderboard
    from paceline.report.terminal.race import leaderboard_json, print_leaderboard

    found = read_leaderboard(folder)
    if as_json:
        print_json(leaderboard_json(found))
    else:
        print_leaderboard(found, data_console())
