"""Restarts: run a job again after its ranks failed or a host was lost, from the run's newest checkpoint.

torch's own restarts are not used: its static rendezvous cannot go on with fewer hosts. The leader ends the job on all
hosts, and posts it again, with a new store for its ranks, to the hosts that still answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.config import LaunchConfig, RunConfig
from paceline.errors import HangError, LaunchError, PacelineError, PreemptedError, RankError, UsageError
from paceline.formatting import plural
from paceline.launch.job import Job
from paceline.launch.launcher_process import Notify, Shape
from paceline.launch.leader import Leader
from paceline.records.schema import CHECKPOINTS_FOLDER, steps_file
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import read_info
from paceline.training.checkpoints.storage.reading import read_checkpoint_info

MOST_REPEATS = 2
"""Restarts after which the same error at the same step counts as a bug that no restart cures."""
_TAIL_BYTES = 4096

ConfigForShape = Callable[[Shape], RunConfig]
"""Function that returns the config of the run on other hosts than at first; raises `UsageError` if it cannot run."""


class WrittenCheckpoint(NamedTuple):
    """A checkpoint in a run's folder."""

    step: int
    time: float
    """Time of writing: a run that resumes may write the same step again."""


class RestartPoint(NamedTuple):
    """Place that a restart goes on from."""

    resume: str
    """Value for `Job.resume`."""
    step: int | None
    """None if the run begins again."""


@dataclass
class RestartingLeader:
    """Runs a job of one run, and runs it again after a failure that a restart may cure."""

    leader: Leader
    launch: LaunchConfig
    config_for: ConfigForShape
    notify: Notify
    restarts: int = 0
    """Restarts so far."""
    _repeats: int = 0
    """Consecutive restarts that ended with the same error at the same step."""
    _last: tuple[str, int] | None = None
    """Identity and step of the last failure."""
    _newest_at_start: WrittenCheckpoint | None = None
    """Newest checkpoint in the run's folder before a run that resumes goes on."""

    def run(self, job: Job, shape: Shape) -> None:
        """Run the job, at most `max_restarts` times again.

        Raise the error of the last attempt if that is not enough, if the same error occurs at the same step for the
        third time, if fewer than `min_hosts` hosts are left, and at once for an error that a restart cannot cure.
        """
        if not self.launch.max_restarts:
            self.leader.run(job, shape)
            return
        if job.resume:
            self._newest_at_start = newest_checkpoint(job.runs[0][1].path)
        with self.leader.early_stop.kept() if job.stops_on_request else nullcontext():
            while True:
                try:
                    self.leader.run(job, shape)
                except (RankError, LaunchError) as error:
                    shape, config, resume = self._plan_restart(error, job, shape)
                else:
                    return
                # Outside of `except`: the traceback would keep the store of the failed attempt open, and its port in
                # use.
                job = job.restarted(config, resume)

    def _plan_restart(self, error: PacelineError, job: Job, shape: Shape) -> tuple[Shape, RunConfig, str]:
        """Return the shape, the config and the origin of the next attempt, and announce it.

        Raise the error if there is none.
        """
        ((config, folder),) = job.runs
        lost = self.leader.lost_hosts
        if self.restarts >= self.launch.max_restarts or self.leader.stop_requested:
            raise error
        if isinstance(error, LaunchError) and not lost:
            raise error
        resume, step = self._restart_point(job)
        origin = "the beginning" if step is None else f"the checkpoint of step {step}"
        if self.leader.early_stop.received is not None:
            raise PreemptedError(
                f"{_clause(error)}; {self.leader.early_stop.received.name} asked to stop, so the run is not restarted "
                f"from {origin}.",
                hint="start the same command again with --resume auto, and it goes on from there",
            )
        self._check_progress(error, max(step or 0, last_step(folder.path) or 0))
        hosts = ""
        if lost:
            shape = self._shrink(error, shape)
            config = self._config_on_fewer_hosts(error, shape)
            hosts = f" on {plural(shape.hosts, 'host')} with {plural(shape.ranks, 'rank')}"
        self.restarts += 1
        self.notify(f"{_clause(error)}; restart {self.restarts} of {self.launch.max_restarts}{hosts} from {origin}")
        return shape, config, resume

    def _restart_point(self, job: Job) -> RestartPoint:
        """Return the run's newest checkpoint, or until this command has written one, the checkpoint of `--resume`.

        The run's folder may have newer checkpoints than that one, which the user has rejected, or none.
        """
        ((_, folder),) = job.runs
        newest = newest_checkpoint(folder.path)
        if job.resume and Path(job.resume) != folder.path and newest == self._newest_at_start:
            return RestartPoint(job.resume, read_info(Path(job.resume)).step)
        return RestartPoint(str(folder.path), None if newest is None else newest.step)

    def _check_progress(self, error: PacelineError, step: int) -> None:
        """Raise the error if it occurred several times at the same step: a bug, which no restart cures."""
        failure = _identity(error), step
        self._repeats = self._repeats + 1 if failure == self._last else 0
        self._last = failure
        if self._repeats >= MOST_REPEATS:
            self.notify(
                f"{self._repeats} restarts ended with the same error at the same step; restart "
                f"{self.restarts + 1} of {self.launch.max_restarts} would, too, and is left out"
            )
            raise error

    def _shrink(self, error: PacelineError, shape: Shape) -> Shape:
        """Return the shape without the hosts that do not answer; raise if too few are left."""
        least = self.launch.min_hosts
        if least is None or any(info.launcher == 0 for info in self.leader.lost_hosts):
            raise error
        hosts = self.leader.drop_lost_hosts()
        if hosts < least:
            left = f"{plural(hosts, 'host')} {'is' if hosts == 1 else 'are'} left"
            raise LaunchError(
                f"{_clause(error)}: {left}, fewer than --min-hosts {least}.",
                hint="repair the lost host, and start the same command again",
            )
        return Shape(min(shape.hosts, hosts), shape.ranks_per_host)

    def _config_on_fewer_hosts(self, error: PacelineError, shape: Shape) -> RunConfig:
        try:
            return self.config_for(shape)
        except UsageError as reason:
            raise LaunchError(
                f"{_clause(error)}, and the run cannot go on with {plural(shape.ranks, 'rank')}: {reason}",
                hint=reason.hint,
            ) from None


def _clause(error: PacelineError) -> str:
    """Return the message of an error as a part of a longer sentence."""
    return error.message.rstrip(".")


def _identity(error: PacelineError) -> str:
    """Return what tells an error from others. The message of a hang has times, and statuses of any age."""
    return type(error).__name__ if isinstance(error, HangError) else error.message


def last_step(folder: Path) -> int | None:
    """Return the last step that rank 0 recorded in a run's folder; None if there is none."""
    try:
        with (folder / steps_file(0)).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # The last one may be truncated.
    except OSError:
        return None
    step = lines[-1].partition(b",")[0] if lines else b""
    return int(step) if step.isdigit() else None


def newest_checkpoint(folder: Path) -> WrittenCheckpoint | None:
    """Return the checkpoint in a run's folder that a restart goes on from: the one that was written last.

    Its tensors are not read; if they are damaged, rank 0 goes on from the one before.
    """
    info, _ = CheckpointFolder(folder / CHECKPOINTS_FOLDER).newest_by(read_checkpoint_info)
    return None if info is None else WrittenCheckpoint(info.step, info.time)
