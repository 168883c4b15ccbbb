"""Follower: a launcher process that starts its ranks of each job that the leader posts, and reports how they ended.

It starts nothing but runs of its own command (`launch/channel/own_command.py`), and only on the leader's signed word.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.config import LaunchConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, LaunchError, PacelineError
from paceline.launch.channel.heartbeat import send_heartbeats
from paceline.launch.channel.own_command import OwnCommand
from paceline.launch.channel.store_channel import POLL_S, StoreChannel
from paceline.launch.elastic import STOP_GRACE_S, start_ranks, terminate_ranks
from paceline.launch.faults.failures import error_from_info, error_to_info
from paceline.launch.faults.stop_signals import EarlyStop, GracefulStop
from paceline.launch.job import JOB_FILE, Job
from paceline.launch.launcher_process import LauncherProcess, RankRange
from paceline.records.failure import ErrorInfo
from paceline.records.schema import ERRORS_FOLDER, LOGS_FOLDER

RESUME_HINT = "the run ends with host 0; start the command on all hosts with --resume to go on from its checkpoint"
END = "end"
"""Key of the leader's `LaunchEnd`: there are no more jobs."""


class LaunchEnd(msgspec.Struct, frozen=True, kw_only=True):
    """End of the leader."""

    interrupted: bool = False
    """Whether Ctrl-C ended it."""
    error: ErrorInfo | None = None
    """Error that ended it, if any."""

    @classmethod
    def of(cls, error: BaseException | None) -> LaunchEnd:
        """Return the end by an exception, or without one."""
        if isinstance(error, KeyboardInterrupt):
            return cls(interrupted=True)
        return cls(error=None if error is None else error_to_info(error))


class PostedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as the leader posts it."""

    rank_ranges: list[RankRange]
    endpoint: str
    """ADDRESS:PORT of the rendezvous of its ranks."""
    file: Path
    """File of the job on the leader's disk."""
    job: str
    """Content of the file."""


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a follower on its ranks of a job."""

    codes: dict[int, int]
    """Exit codes of the ranks that failed, by rank."""
    error: ErrorInfo | None
    """Why no rank could be started; None if they were."""
    sends_files: bool
    """Whether the follower does not share the leader's disk, so that it sends the files that its ranks wrote."""


class OwnCopy(NamedTuple):
    """A job as a follower runs it."""

    job: Job
    """Job with folders that exist on this host: the leader's on a shared disk, otherwise temporary ones."""
    file: Path
    """File from which the ranks read it."""
    files_to_send: Path | None
    """Root of the files that the leader does not see; None on a shared disk."""


def job_key(number: int) -> str:
    """Return the key of a job's description, which the leader posts."""
    return f"job-{number}"


def failed_key(number: int) -> str:
    """Return the key that a launcher posts when some of its ranks of a job failed."""
    return f"failed-{number}"


def stop_key(number: int) -> str:
    """Return the key that a follower posts when a signal asks it to stop the ranks of a job."""
    return f"stop-{number}"


def outcome_key(number: int, launcher: int) -> str:
    """Return the key of a follower's report on its ranks of a job."""
    return f"outcome-{number}-{launcher}"


def files_key(number: int, launcher: int) -> str:
    """Return the key of the files that a follower's ranks of a job wrote."""
    return f"files-{number}-{launcher}"


def end_read_key(launcher: int) -> str:
    """Return the key that a follower posts after it has read `END`, while its ranks may still run."""
    return f"{END}-read-{launcher}"


def finished_key(launcher: int) -> str:
    """Return the key that a follower posts after it has read `END` and its ranks have ended."""
    return f"finished-{launcher}"


class EndOfLeader:
    """The leader's `LaunchEnd`, known from the moment that a thread of this follower has read it.

    The store ends with the leader, which does not wait for ranks that take long to stop.
    """

    def __init__(self, channel: StoreChannel, launcher: int) -> None:
        self._channel = channel
        self._launcher = launcher
        self.known: LaunchEnd | None = None
        """None until it has been read."""

    def read(self) -> LaunchEnd | None:
        """Return the end; None if the leader has not posted it."""
        if self.known is None:
            end = self._channel.find(END, LaunchEnd)
            if end is not None:
                self.known = end
                self._channel.keep(end_read_key(self._launcher), True)
        return self.known


def follow(channel: StoreChannel, launcher: LauncherProcess, launch: LaunchConfig, command: OwnCommand) -> None:
    """Run this launcher's ranks of every job until the leader posts `END`; refuse jobs that `command` does not have."""
    early = EarlyStop()
    keeping = early.kept() if launch.max_restarts else contextlib.nullcontext()
    end = EndOfLeader(channel, launcher.number)
    with send_heartbeats(channel, launcher.number, on_answer=end.read, on_silence=terminate_ranks), keeping:
        try:
            for number in itertools.count(1):
                posted = _next_job(channel, number, end)
                if posted is None:
                    break
                own = [rank_range for rank_range in posted.rank_ranges if rank_range.launcher == launcher.number]
                if own:
                    _run_job(channel, number, own[0], posted, launch, command, early, end)
            channel.keep(finished_key(launcher.number), True)
        except LaunchError:
            if end.known is None:
                raise
    assert end.known is not None
    _finish(end.known, launcher)


def _next_job(channel: StoreChannel, number: int, end: EndOfLeader) -> PostedJob | None:
    """Wait for the next job; return None if the leader has ended instead."""
    while end.read() is None:
        posted = channel.find(job_key(number), PostedJob)
        if posted is not None:
            channel.release()  # The leader posts a job when it has the outcome of the one before.
            return posted
        time.sleep(POLL_S)
    return None


def _run_job(
    channel: StoreChannel,
    number: int,
    rank_range: RankRange,
    posted: PostedJob,
    launch: LaunchConfig,
    command: OwnCommand,
    early: EarlyStop,
    end: EndOfLeader,
) -> None:
    """Start this launcher's ranks of a job, wait for them, and post the outcome."""
    try:
        job = command.adopt(Job.from_json(posted.job), launch)
        shared = sees_file(posted, job)
        check_paths(job)
    except (PacelineError, ValueError, RecursionError) as error:  # The last two: a text that is not a job.
        channel.keep(failed_key(number), rank_range.launcher)
        outcome = JobOutcome(codes={}, error=error_to_info(error), sends_files=False)
        channel.keep(outcome_key(number, rank_range.launcher), outcome)
        return
    codes: dict[int, int] = {}
    failure: ErrorInfo | None = None

    def remote_failed() -> float | None:
        try:
            return STOP_GRACE_S if end.read() or channel.has(failed_key(number)) else None
        except LaunchError:  # The leader has ended, and its ranks with it.
            return STOP_GRACE_S

    with _own_copy(job, shared=shared) as (job, file, root):
        if job.stops_on_request:
            channel.lost_hint = RESUME_HINT
        stop = GracefulStop(
            request=lambda: channel.keep(stop_key(number), rank_range.launcher),
            is_requested_elsewhere=lambda: False,  # The leader ends all ranks.
            grace_s=launch.grace,
            notify=lambda _: None,
            early=early,
        )
        try:
            codes = start_ranks(
                job,
                rank_range,
                posted.endpoint,
                store=None,
                signer=channel.signer.derive("job", str(number)),
                threads=launch.threads,
                remote_failed=remote_failed,
                stop=stop if job.stops_on_request else None,
                file=file,
            )
        except PacelineError as error:
            failure = error_to_info(error)
        if codes or failure:
            channel.keep(failed_key(number), rank_range.launcher)
        if root is not None:
            channel.send_files(files_key(number, rank_range.launcher), root)
    outcome = JobOutcome(codes=codes, error=failure, sends_files=not shared)
    channel.keep(outcome_key(number, rank_range.launcher), outcome)


def sees_file(posted: PostedJob, job: Job) -> bool:
    """Return whether this host sees the job's file on a disk that it shares with the leader."""
    try:
        found = posted.file.lstat()
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        return is_own and posted.file == job.file and posted.file.read_text() == posted.job
    except OSError:
        return False


def check_paths(job: Job) -> None:
    """Raise `LaunchError` if a path of a job is relative or leads out of its folder, as in /runs/../etc."""
    for path in (*job.folders, *map(Path, filter(None, (job.resume, job.oracle)))):
        if not path.is_absolute() or ".." in path.parts:
            raise LaunchError(
                f"a follower refused a job with the path {path}, which is not absolute or contains `..`.",
                hint="start the same command on all hosts; if it is the same, another program sent the job",
            )


@contextlib.contextmanager
def _own_copy(job: Job, *, shared: bool) -> Iterator[OwnCopy]:
    """Yield the job as the ranks of this host read it, in a temporary folder that only this user can write to."""
    root = Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        if shared:
            yield OwnCopy(job, job.write(root / JOB_FILE), None)
            return
        own = job.with_paths(lambda path: root / path.relative_to(path.anchor))
        for folder in own.folders:
            for inner in (LOGS_FOLDER, ERRORS_FOLDER):
                (folder / inner).mkdir(parents=True, exist_ok=True)
        yield OwnCopy(own, own.write(), root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _finish(end: LaunchEnd, launcher: LauncherProcess) -> None:
    """Raise the error or exit with the code that ended the leader, if any."""
    if end.interrupted:
        raise SystemExit(INTERRUPTED_EXIT_CODE)
    if end.error is None:
        return
    error = error_from_info(end.error)
    if launcher.started_by == "paceline":
        raise error
    raise SystemExit(error.exit_code)  # All launchers print to one terminal, where the leader shows the error.
