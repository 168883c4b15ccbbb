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

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.network import LOOPBACK, source_address
from paceline.config import LaunchConfig
from paceline.errors import LaunchError, PacelineError
from paceline.launch import rendezvous
from paceline.launch.elastic import start_ranks
from paceline.launch.failures import explain, from_message, to_message
from paceline.launch.follower import END, follow
from paceline.launch.job import Job
from paceline.launch.mail import Mail
from paceline.launch.meeting import hello_of, meet
from paceline.launch.meeting_place import open_mail
from paceline.launch.presence import Presence
from paceline.launch.seat import Hello, Part, Say, Seat, Shape
from paceline.launch.seating import parts_of
from paceline.records.schema import FINISHED_FILE

ANSWER_S = 60.0
"""How long a host may take to say how its ranks ended, once it is clear that they did."""
FAREWELL_S = 8.0
"""How long it takes others to end their ranks, and to hear that all is done."""


@dataclass
class Fleet:
    """The leader's view of all processes that start ranks."""

    seat: Seat
    launch: LaunchConfig
    hellos: list[Hello]
    mail: Mail | None
    """How it speaks to the others; None where there are none."""
    jobs: int = 0

    def __post_init__(self) -> None:
        self._presence = None if self.mail is None else Presence(self.mail, [hello.seat for hello in self.hellos[1:]])

    def run(self, job: Job, shape: Shape) -> None:
        """Has the first hosts start a job's ranks; returns when all are done, or raises why the first failed."""
        self._check_all_are_there()
        self.jobs += 1
        parts = parts_of(shape, self.seat, self.hellos)
        if self.mail is not None:
            job = job.moved(lambda path: path.resolve())  # Other hosts may have started in another folder.
        job.write()
        listener = rendezvous.bind(*self._where_to_listen(parts))
        address, port = listener.getsockname()[:2]
        endpoint = rendezvous.endpoint(address, port)
        # It stays open until all hosts have said how their ranks ended: they are connected to it.
        store = rendezvous.open_store(address, port, listener, timedelta(seconds=job.timeout))
        if self.mail is not None:
            order = {"parts": [asdict(part) for part in parts], "endpoint": endpoint}
            self.mail.post(f"job-{self.jobs}", order | {"file": str(job.file), "job": job.to_json()})
        codes, failure = self._start(job, parts[0], endpoint, store)
        for part in parts[1:]:
            others, reason = self._outcome(part, job, failed=bool(codes or failure))
            codes |= others
            failure = reason or failure  # One that could not start is why the others could not.
        if (codes or failure) and not _all_finished(job):
            self._check_all_are_there()
            raise failure or explain(codes, job.folder, range(shape.ranks))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets the others go; where we failed, they hear why."""
        if self.mail is None:
            return
        with contextlib.suppress(LaunchError):
            self.mail.post(END, to_message(error))
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

    def _start(self, job: Job, part: Part, endpoint: str, store: Store) -> tuple[dict[int, int], PacelineError | None]:
        """Starts the leader's own ranks: how those that failed ended, or why none could be started."""
        codes: dict[int, int] = {}
        failure: PacelineError | None = None
        try:
            codes = start_ranks(
                job, part, endpoint, store=store, threads=self.launch.threads, failed_elsewhere=self._failed_elsewhere
            )
        except LaunchError as error:
            failure = error
        if self.mail is not None and (codes or failure):
            self.mail.post(f"failed-{self.jobs}", part.seat)
        return codes, failure

    def _failed_elsewhere(self) -> bool:
        """Whether ranks of another host have failed, or the host is gone."""
        if self.mail is None or self._presence is None:
            return False
        return self.mail.has(f"failed-{self.jobs}") or bool(self._presence.gone())

    def _outcome(self, part: Part, job: Job, *, failed: bool) -> tuple[dict[int, int], PacelineError | None]:
        """How the ranks of another seat ended, or why it could not start them; nothing of one that is gone."""
        assert self.mail is not None
        assert self._presence is not None
        key = f"outcome-{self.jobs}-{part.seat}"
        deadline = time.monotonic() + ANSWER_S + (0.0 if failed else job.timeout)
        while not self.mail.wait(key, within_s=0.5):
            if part.seat in self._presence.gone():
                return {}, None
            if time.monotonic() > deadline:
                name = self.hellos[part.seat].name
                return {}, LaunchError(f"{name} does not say how its ranks ended.", hint="see what it printed")
        outcome = self.mail.read(key)
        if outcome["files"]:
            self.mail.receive_files(f"files-{self.jobs}-{part.seat}", Path("/"), job.folders)
        codes = {int(rank): code for rank, code in outcome["codes"].items()}
        return codes, None if outcome["error"] is None else from_message(outcome["error"])

    def _check_all_are_there(self) -> None:
        """Refuses to go on without a host: what it would have trained, no strategy is to blame for."""
        gone = set() if self._presence is None else self._presence.gone()
        if gone:
            names = [self.hellos[seat].name for seat in sorted(gone)]
            verb = "is" if len(names) == 1 else "are"
            raise LaunchError(f"{' and '.join(names)} {verb} gone.", hint="see what was printed there")


def join_fleet(
    seat: Seat, launch: LaunchConfig, settings: Mapping[str, Any], *, timeout_s: float, say: Say
) -> Fleet | None:
    """The fleet, on the process that leads it. On all others: starts ranks when told to, and None when all is done."""
    if seat.seats == 1:
        return Fleet(seat, launch, [hello_of(seat, LOOPBACK, settings)], None)
    mail, address = open_mail(seat, timeout_s, say)
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
