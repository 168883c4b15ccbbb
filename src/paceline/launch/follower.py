"""What a process does that starts ranks and does not lead: it starts its part of every job, and says how it ended."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config import LaunchConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, LaunchError, PacelineError
from paceline.launch.elastic import start_ranks
from paceline.launch.failures import from_message, to_message
from paceline.launch.heartbeat import send_heartbeats
from paceline.launch.job import Job
from paceline.launch.launcher_process import LauncherProcess, RankRange
from paceline.launch.store_channel import POLL_S, StoreChannel
from paceline.records.schema import ERRORS_FOLDER, LOGS_FOLDER

END = "end"
"""The key under which the leader says that all is done."""


def follow(channel: StoreChannel, launcher: LauncherProcess, launch: LaunchConfig) -> None:
    """Starts ranks when the leader says so, until it says that all is done."""
    with send_heartbeats(channel, launcher.number):
        number = 1
        while _wait_for_job(channel, number):
            order = channel.read(f"job-{number}")
            own = [rank_range for rank_range in order["rank_ranges"] if rank_range["launcher"] == launcher.number]
            if own:
                _run_job(channel, number, RankRange(**own[0]), order, launch)
            number += 1
    _leave(channel, launcher)


def _wait_for_job(channel: StoreChannel, number: int) -> bool:
    """Waits for the next job; False where there is none any more."""
    while not channel.has(f"job-{number}"):
        if channel.has(END):
            return False
        time.sleep(POLL_S)
    return True


def _run_job(
    channel: StoreChannel, number: int, rank_range: RankRange, order: Mapping[str, Any], launch: LaunchConfig
) -> None:
    """Starts our ranks for a job, and says how they ended."""
    file = Path(order["file"])
    shared = file.is_file() and file.read_text() == order["job"]
    outcome: dict[str, Any] = {"codes": {}, "error": None, "files": not shared}

    def failed_elsewhere() -> bool:
        try:
            return channel.has(f"failed-{number}") or channel.has(END)
        except LaunchError:  # The leader is gone, and its ranks with it.
            return True

    with _folders(Job.from_json(order["job"], file.parent), shared=shared) as (job, root):
        try:
            outcome["codes"] = start_ranks(
                job,
                rank_range,
                order["endpoint"],
                store=None,
                threads=launch.threads,
                failed_elsewhere=failed_elsewhere,
            )
        except PacelineError as error:
            outcome["error"] = to_message(error)
        if outcome["codes"] or outcome["error"]:
            channel.post(f"failed-{number}", rank_range.launcher)
        if root is not None:
            channel.send_files(f"files-{number}-{rank_range.launcher}", root)
    channel.post(f"outcome-{number}-{rank_range.launcher}", outcome)


@contextlib.contextmanager
def _folders(job: Job, *, shared: bool) -> Iterator[tuple[Job, Path | None]]:
    """The job with folders that are there: the leader's, or else some of our own for as long as it takes."""
    if shared:
        yield job, None
        return
    root = Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        own = job.moved(lambda path: root / path.relative_to("/"))
        for folder in own.folders:
            for inner in (LOGS_FOLDER, ERRORS_FOLDER):
                (folder / inner).mkdir(parents=True, exist_ok=True)
        own.write()
        yield own, root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _leave(channel: StoreChannel, launcher: LauncherProcess) -> None:
    """Leaves as the leader does: with its error, where it had one."""
    farewell = channel.read(END)
    channel.post(f"bye-{launcher.number}", None)
    if farewell["interrupted"]:
        raise SystemExit(INTERRUPTED_EXIT_CODE)
    if farewell["kind"] is None:
        return
    error = from_message(farewell)
    if launcher.started_by == "paceline":
        raise error
    raise SystemExit(error.exit_code)  # On one terminal once is enough.
