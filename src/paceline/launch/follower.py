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
from paceline.launch.job import Job
from paceline.launch.mail import POLL_S, Mail
from paceline.launch.presence import present
from paceline.launch.seat import Part, Seat
from paceline.records.schema import ERRORS_FOLDER, LOGS_FOLDER

END = "end"
"""The key under which the leader says that all is done."""


def follow(mail: Mail, seat: Seat, launch: LaunchConfig) -> None:
    """Starts ranks when the leader says so, until it says that all is done."""
    with present(mail, seat.number):
        number = 1
        while _wait_for_job(mail, number):
            order = mail.read(f"job-{number}")
            own = [part for part in order["parts"] if part["seat"] == seat.number]
            if own:
                _take_part(mail, number, Part(**own[0]), order, launch)
            number += 1
    _part_ways(mail, seat)


def _wait_for_job(mail: Mail, number: int) -> bool:
    """Waits for the next job; False where there is none any more."""
    while not mail.has(f"job-{number}"):
        if mail.has(END):
            return False
        time.sleep(POLL_S)
    return True


def _take_part(mail: Mail, number: int, part: Part, order: Mapping[str, Any], launch: LaunchConfig) -> None:
    """Starts our ranks for a job, and says how they ended."""
    file = Path(order["file"])
    shared = file.is_file() and file.read_text() == order["job"]
    outcome: dict[str, Any] = {"codes": {}, "error": None, "files": not shared}

    def failed_elsewhere() -> bool:
        try:
            return mail.has(f"failed-{number}") or mail.has(END)
        except LaunchError:  # The leader is gone, and its ranks with it.
            return True

    with _folders(Job.from_json(order["job"], file.parent), shared=shared) as (job, root):
        try:
            outcome["codes"] = start_ranks(
                job, part, order["endpoint"], store=None, threads=launch.threads, failed_elsewhere=failed_elsewhere
            )
        except PacelineError as error:
            outcome["error"] = to_message(error)
        if outcome["codes"] or outcome["error"]:
            mail.post(f"failed-{number}", part.seat)
        if root is not None:
            mail.send_files(f"files-{number}-{part.seat}", root)
    mail.post(f"outcome-{number}-{part.seat}", outcome)


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


def _part_ways(mail: Mail, seat: Seat) -> None:
    """Leaves as the leader does: with its error, where it had one."""
    farewell = mail.read(END)
    mail.post(f"bye-{seat.number}", None)
    if farewell["interrupted"]:
        raise SystemExit(INTERRUPTED_EXIT_CODE)
    if farewell["kind"] is None:
        return
    error = from_message(farewell)
    if seat.launcher == "paceline":
        raise error
    raise SystemExit(error.exit_code)  # On one terminal once is enough.
