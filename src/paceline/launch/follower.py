"""Follower: a launcher process that starts its ranks of each job that the leader posts, and reports how they ended."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.config import LaunchConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, LaunchError, PacelineError
from paceline.launch.elastic import STOP_GRACE_S, start_ranks, terminate_ranks
from paceline.launch.failures import error_from_info, error_to_info
from paceline.launch.heartbeat import send_heartbeats
from paceline.launch.job import Job
from paceline.launch.launcher_process import LauncherProcess, RankRange
from paceline.launch.stop_signals import GracefulStop
from paceline.launch.store_channel import POLL_S, StoreChannel
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


def finished_key(launcher: int) -> str:
    """Return the key that a follower posts after it has read `END`."""
    return f"finished-{launcher}"


def follow(channel: StoreChannel, launcher: LauncherProcess, launch: LaunchConfig) -> None:
    """Run this launcher's ranks of every job until the leader posts `END`."""
    with send_heartbeats(channel, launcher.number, terminate_ranks):
        number = 1
        while _wait_for_job(channel, number):
            posted = channel.read(job_key(number), PostedJob)
            own = [rank_range for rank_range in posted.rank_ranges if rank_range.launcher == launcher.number]
            if own:
                _run_job(channel, number, own[0], posted, launch)
            number += 1
    _finish(channel, launcher)


def _wait_for_job(channel: StoreChannel, number: int) -> bool:
    """Wait for the next job; return False if there are no more."""
    while not channel.has(job_key(number)):
        if channel.has(END):
            return False
        time.sleep(POLL_S)
    return True


def _run_job(
    channel: StoreChannel, number: int, rank_range: RankRange, posted: PostedJob, launch: LaunchConfig
) -> None:
    """Start this launcher's ranks of a job, wait for them, and post the outcome."""
    shared = posted.file.is_file() and posted.file.read_text() == posted.job
    codes: dict[int, int] = {}
    failure: ErrorInfo | None = None

    def remote_failed() -> float | None:
        try:
            return STOP_GRACE_S if channel.has(failed_key(number)) or channel.has(END) else None
        except LaunchError:  # The leader has ended, and its ranks with it.
            return STOP_GRACE_S

    with _writable_folders(Job.from_json(posted.job), shared=shared) as (job, root):
        if job.stops_on_request:
            channel.lost_hint = RESUME_HINT
        stop = GracefulStop(
            request=lambda: channel.post(stop_key(number), rank_range.launcher),
            is_requested_elsewhere=lambda: False,  # The leader ends all ranks.
            grace_s=launch.grace,
            notify=lambda _: None,
        )
        try:
            codes = start_ranks(
                job,
                rank_range,
                posted.endpoint,
                store=None,
                threads=launch.threads,
                remote_failed=remote_failed,
                stop=stop if job.stops_on_request else None,
            )
        except PacelineError as error:
            failure = error_to_info(error)
        if codes or failure:
            channel.post(failed_key(number), rank_range.launcher)
        if root is not None:
            channel.send_files(files_key(number, rank_range.launcher), root)
    outcome = JobOutcome(codes=codes, error=failure, sends_files=not shared)
    channel.post(outcome_key(number, rank_range.launcher), outcome)


@contextlib.contextmanager
def _writable_folders(job: Job, *, shared: bool) -> Iterator[tuple[Job, Path | None]]:
    """Yield the job with folders that exist on this host, and the root of temporary folders.

    On a disk shared with the leader these are the leader's folders, and the root is None.
    """
    if shared:
        yield job, None
        return
    root = Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        own = job.with_paths(lambda path: root / path.relative_to("/"))
        for folder in own.folders:
            for inner in (LOGS_FOLDER, ERRORS_FOLDER):
                (folder / inner).mkdir(parents=True, exist_ok=True)
        own.write()
        yield own, root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _finish(channel: StoreChannel, launcher: LauncherProcess) -> None:
    """Confirm the end to the leader; then raise the error or exit with the code that ended the leader, if any."""
    end = channel.read(END, LaunchEnd)
    channel.post(finished_key(launcher.number), None)
    if end.interrupted:
        raise SystemExit(INTERRUPTED_EXIT_CODE)
    if end.error is None:
        return
    error = error_from_info(end.error)
    if launcher.started_by == "paceline":
        raise error
    raise SystemExit(error.exit_code)  # All launchers print to one terminal, where the leader shows the error.
