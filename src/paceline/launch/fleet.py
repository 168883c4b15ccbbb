"""The fleet: all processes that start ranks, one of which leads.

On several hosts the same command runs on each. Seat 0 has the say: it posts a job, every seat that is part of it starts
its ranks through torch's elastic launcher, and says how they ended. Ranks of one job meet at a store of their own, so
that jobs do not hear each other. A host that does not share the leader's disk sends what its ranks wrote.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.comm.network import LOOPBACK, source_address
from paceline.config import LaunchConfig
from paceline.errors import LaunchError, PacelineError, RankError
from paceline.launch import rendezvous
from paceline.launch.failures import explain, from_message, to_message
from paceline.launch.follower import follow, start_part
from paceline.launch.job import Job
from paceline.launch.mail import Mail
from paceline.launch.meeting import Say, hello_of, meet, open_mail
from paceline.launch.seat import Hello, Part, Seat, Shape
from paceline.launch.seating import parts_of
from paceline.records.schema import FINISHED_FILE

ANSWER_S = 10.0
"""How long a host may take to say how its ranks ended, once it is clear that they did."""
FAREWELL_S = 3.0


@dataclass
class Fleet:
    """The leader's view of all processes that start ranks."""

    seat: Seat
    launch: LaunchConfig
    hellos: list[Hello]
    mail: Mail | None
    """How it speaks to the others; None where there are none."""
    jobs: int = 0

    def run(self, job: Job, shape: Shape) -> None:
        """Has the first hosts start a job's ranks; returns when all are done, or raises why the first failed."""
        self.jobs += 1
        parts = parts_of(shape, self.seat, self.hellos)
        if self.mail is not None:
            job = job.moved(lambda path: path.resolve())  # Other hosts may have started in another folder.
        job.write()
        listener = rendezvous.bind(*self._where_to_listen(parts))
        address, port = listener.getsockname()[:2]
        endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        store = rendezvous.open_store(address, port, listener, timedelta(seconds=job.timeout))
        if self.mail is not None:
            order = {"parts": [asdict(part) for part in parts], "endpoint": endpoint}
            self.mail.post(f"job-{self.jobs}", order | {"file": str(job.file), "job": job.to_json()})
        codes = start_part(job, parts[0], endpoint, store, self.mail, self.jobs, self.launch.threads)
        lost: list[Part] = []
        for part in parts[1:]:
            outcome = self._outcome(part, job, failed=bool(codes))
            if outcome is None:
                lost.append(part)
            else:
                codes |= outcome
        if (codes or lost) and not _all_finished(job):
            raise self._reason(codes, lost, job, shape)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets the others go; where we failed, they hear why."""
        if self.mail is None:
            return
        with contextlib.suppress(LaunchError):
            self.mail.post("end", to_message(error))
            deadline = time.monotonic() + FAREWELL_S
            for hello in self.hellos[1:]:
                self.mail.wait(f"bye-{hello.seat}", within_s=deadline - time.monotonic())

    def _where_to_listen(self, parts: Sequence[Part]) -> tuple[str, int]:
        """Our address on the way to the first other host that takes part; loopback, or the user's, where none does."""
        if self.mail is None:
            return rendezvous.parse_master(self.seat.master) if self.seat.master else (LOOPBACK, 0)
        others = [self.hellos[part.seat] for part in parts if self.hellos[part.seat].network != self.hellos[0].network]
        if others:
            return source_address(others[0].address), 0
        return self.hellos[0].address if len(parts) > 1 else LOOPBACK, 0

    def _outcome(self, part: Part, job: Job, *, failed: bool) -> dict[int, int] | None:
        """How the ranks of another seat ended; None where it does not say so any more."""
        assert self.mail is not None
        key = f"outcome-{self.jobs}-{part.seat}"
        if not self.mail.wait(key, within_s=ANSWER_S if failed else job.timeout + ANSWER_S):
            return None
        outcome = self.mail.read(key)
        if outcome["files"]:
            self.mail.receive_files(f"files-{self.jobs}-{part.seat}", Path("/"), job.folders)
        if outcome["error"] is not None:
            raise from_message(outcome["error"])
        return {int(rank): code for rank, code in outcome["codes"].items()}

    def _reason(self, codes: Mapping[int, int], lost: Sequence[Part], job: Job, shape: Shape) -> PacelineError:
        if lost:
            names = ", ".join(f"host {self.hellos[p.seat].node} ({self.hellos[p.seat].host})" for p in lost)
            return RankError(f"{names} is gone: its ranks ended, and it does not say how.", hint="see what it printed")
        return explain(codes, job.folder, range(shape.ranks))


def join_fleet(
    seat: Seat, launch: LaunchConfig, settings: Mapping[str, Any], *, timeout_s: float, say: Say
) -> Fleet | None:
    """The fleet, on the process that leads it. On all others: starts ranks when told to, and None when all is done."""
    if seat.seats == 1:
        return Fleet(seat, launch, [hello_of(seat, LOOPBACK, settings)], None)
    mail, address = open_mail(seat, timeout_s)
    hellos = meet(mail, seat, hello_of(seat, address, settings), timeout_s, say)
    if seat.leads:
        return Fleet(seat, launch, hellos, mail)
    if seat.launcher == "paceline":
        say(f"host {seat.number} of {seat.seats}: host 0 ({hellos[0].host}) leads, and shows what is done")
    follow(mail, seat, launch)
    return None


def _all_finished(job: Job) -> bool:
    """Whether every run did all it set out to do: a process that dies after that has not failed."""
    return all((folder.path / FINISHED_FILE).exists() for _, folder in job.runs)
