"""What a process does that starts ranks and does not lead: it starts its part of every job, and says how it ended."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.config import LaunchConfig
from paceline.errors import INTERRUPTED_EXIT_CODE, LaunchError, PacelineError
from paceline.launch.elastic import start_ranks
from paceline.launch.failures import from_message, to_message
from paceline.launch.job import Job
from paceline.launch.mail import POLL_S, Mail
from paceline.launch.seat import Part, Seat
from paceline.records.schema import ERRORS_FOLDER, LOGS_FOLDER


def follow(mail: Mail, seat: Seat, launch: LaunchConfig) -> None:
    """Starts ranks when the leader says so, until it says that all is done."""
    number = 1
    while True:
        while not mail.has(f"job-{number}"):
            if mail.has("end"):
                _part_ways(mail, seat)
                return
            time.sleep(POLL_S)
        order = mail.read(f"job-{number}")
        parts = [Part(**part) for part in order["parts"]]
        own = [part for part in parts if part.seat == seat.number]
        if own:
            _take_part(mail, number, own[0], order, launch)
        number += 1


def _take_part(mail: Mail, number: int, part: Part, order: Mapping[str, Any], launch: LaunchConfig) -> None:
    """Starts our ranks for a job, and says how they ended."""
    file = Path(order["file"])
    shared = file.is_file() and file.read_text() == order["job"]
    outcome: dict[str, Any] = {"codes": {}, "error": None, "files": not shared}
    with _folders(Job.from_json(order["job"], file.parent), shared=shared) as (job, root):
        try:
            outcome["codes"] = start_part(job, part, order["endpoint"], None, mail, number, launch.threads)
        except PacelineError as error:
            outcome["error"] = to_message(error)
            mail.post(f"failed-{number}", part.seat)
        except KeyboardInterrupt:
            interrupted = LaunchError(f"host {part.seat} was interrupted.")
            mail.post(f"outcome-{number}-{part.seat}", outcome | {"error": to_message(interrupted), "files": False})
            mail.post(f"failed-{number}", part.seat)
            raise
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
    farewell = mail.read("end")
    mail.post(f"bye-{seat.number}", None)
    if farewell["interrupted"]:
        raise SystemExit(INTERRUPTED_EXIT_CODE)
    if farewell["kind"] is None:
        return
    error = from_message(farewell)
    if seat.launcher == "paceline":
        raise error
    raise SystemExit(error.exit_code)  # On one terminal once is enough.


def start_part(
    job: Job,
    part: Part,
    endpoint: str,
    store: Store | None,
    mail: Mail | None,
    number: int,
    threads: int | None,
) -> dict[int, int]:
    """Starts a seat's own ranks; the others hear at once when some fail."""

    def failed_elsewhere() -> bool:
        try:
            return mail is not None and mail.has(f"failed-{number}")
        except LaunchError:  # The leader is gone, and its ranks with it.
            return True

    codes = start_ranks(
        job.file,
        part,
        endpoint,
        store=store,
        threads=threads,
        timeout_s=job.timeout,
        failed_elsewhere=failed_elsewhere,
    )
    if codes and mail is not None:
        mail.post(f"failed-{number}", part.seat)
    return codes
