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
from paceline.launch.control_store import open_channel
from paceline.launch.elastic import start_ranks
from paceline.launch.failures import explain, from_message, to_message
from paceline.launch.follower import END, follow
from paceline.launch.handshake import own_launcher_info, shake_hands
from paceline.launch.heartbeat import HeartbeatMonitor
from paceline.launch.job import Job
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, Notify, RankRange, Shape
from paceline.launch.rank_assignment import assign_ranks
from paceline.launch.store_channel import StoreChannel
from paceline.records.schema import FINISHED_FILE

ANSWER_S = 60.0
"""How long a host may take to say how its ranks ended, once it is clear that they did."""
FOLLOWERS_LEAVE_S = 8.0
"""How long it takes others to end their ranks, and to hear that all is done."""


@dataclass
class Leader:
    """The leader's view of all processes that start ranks."""

    launcher: LauncherProcess
    launch: LaunchConfig
    infos: list[LauncherInfo]
    channel: StoreChannel | None
    """How it speaks to the others; None where there are none."""
    jobs: int = 0

    def __post_init__(self) -> None:
        self._heartbeats = (
            None if self.channel is None else HeartbeatMonitor(self.channel, [info.launcher for info in self.infos[1:]])
        )

    def run(self, job: Job, shape: Shape) -> None:
        """Has the first hosts start a job's ranks; returns when all are done, or raises why the first failed."""
        self._check_all_are_there()
        self.jobs += 1
        rank_ranges = assign_ranks(shape, self.launcher, self.infos)
        if self.channel is not None:
            job = job.moved(lambda path: path.resolve())  # Other hosts may have started in another folder.
        job.write()
        listener = rendezvous.bind(*self._where_to_listen(rank_ranges))
        address, port = listener.getsockname()[:2]
        endpoint = rendezvous.endpoint(address, port)
        # It stays open until all hosts have said how their ranks ended: they are connected to it.
        store = rendezvous.open_store(address, port, listener, timedelta(seconds=job.timeout))
        if self.channel is not None:
            order = {"rank_ranges": [asdict(rank_range) for rank_range in rank_ranges], "endpoint": endpoint}
            self.channel.post(f"job-{self.jobs}", order | {"file": str(job.file), "job": job.to_json()})
        codes, failure = self._start(job, rank_ranges[0], endpoint, store)
        for rank_range in rank_ranges[1:]:
            others, reason = self._outcome(rank_range, job, failed=bool(codes or failure))
            codes |= others
            failure = reason or failure  # One that could not start is why the others could not.
        if (codes or failure) and not _all_finished(job):
            self._check_all_are_there()
            raise failure or explain(codes, job.folder, range(shape.ranks))

    def __enter__(self) -> Leader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets the others go; where we failed, they hear why."""
        if self.channel is None:
            return
        with contextlib.suppress(LaunchError):
            self.channel.post(END, to_message(error))
            deadline = time.monotonic() + FOLLOWERS_LEAVE_S
            for info in self.infos[1:]:
                self.channel.wait(f"bye-{info.launcher}", within_s=deadline - time.monotonic())

    def _where_to_listen(self, rank_ranges: Sequence[RankRange]) -> tuple[str, int]:
        """Our address on the way to the first other host that takes part; loopback, or the user's, where none does."""
        if self.channel is None:
            return rendezvous.parse_master(self.launcher.master) if self.launcher.master else (LOOPBACK, 0)
        others = [
            self.infos[rank_range.launcher]
            for rank_range in rank_ranges
            if self.infos[rank_range.launcher].network != self.infos[0].network
        ]
        if others:
            return source_address(others[0].address), 0
        return self.infos[0].address if len(rank_ranges) > 1 else LOOPBACK, 0

    def _start(
        self, job: Job, rank_range: RankRange, endpoint: str, store: Store
    ) -> tuple[dict[int, int], PacelineError | None]:
        """Starts the leader's own ranks: how those that failed ended, or why none could be started."""
        codes: dict[int, int] = {}
        failure: PacelineError | None = None
        try:
            codes = start_ranks(
                job,
                rank_range,
                endpoint,
                store=store,
                threads=self.launch.threads,
                failed_elsewhere=self._failed_elsewhere,
            )
        except LaunchError as error:
            failure = error
        if self.channel is not None and (codes or failure):
            self.channel.post(f"failed-{self.jobs}", rank_range.launcher)
        return codes, failure

    def _failed_elsewhere(self) -> bool:
        """Whether ranks of another host have failed, or the host is gone."""
        if self.channel is None or self._heartbeats is None:
            return False
        return self.channel.has(f"failed-{self.jobs}") or bool(self._heartbeats.gone())

    def _outcome(self, rank_range: RankRange, job: Job, *, failed: bool) -> tuple[dict[int, int], PacelineError | None]:
        """How the ranks of another seat ended, or why it could not start them; nothing of one that is gone."""
        assert self.channel is not None
        assert self._heartbeats is not None
        key = f"outcome-{self.jobs}-{rank_range.launcher}"
        deadline = time.monotonic() + ANSWER_S + (0.0 if failed else job.timeout)
        while not self.channel.wait(key, within_s=0.5):
            if rank_range.launcher in self._heartbeats.gone():
                return {}, None
            if time.monotonic() > deadline:
                name = self.infos[rank_range.launcher].name
                return {}, LaunchError(f"{name} does not say how its ranks ended.", hint="see what it printed")
        outcome = self.channel.read(key)
        if outcome["files"]:
            self.channel.receive_files(f"files-{self.jobs}-{rank_range.launcher}", Path("/"), job.folders)
        codes = {int(rank): code for rank, code in outcome["codes"].items()}
        return codes, None if outcome["error"] is None else from_message(outcome["error"])

    def _check_all_are_there(self) -> None:
        """Refuses to go on without a host: what it would have trained, no strategy is to blame for."""
        gone = set() if self._heartbeats is None else self._heartbeats.gone()
        if gone:
            names = [self.infos[launcher].name for launcher in sorted(gone)]
            verb = "is" if len(names) == 1 else "are"
            raise LaunchError(f"{' and '.join(names)} {verb} gone.", hint="see what was printed there")


def join_launch(
    launcher: LauncherProcess, launch: LaunchConfig, settings: Mapping[str, Any], *, timeout_s: float, notify: Notify
) -> Leader | None:
    """The fleet, on the process that leads it. On all others: starts ranks when told to, and None when all is done."""
    if launcher.launchers == 1:
        return Leader(launcher, launch, [own_launcher_info(launcher, LOOPBACK, settings)], None)
    channel, address = open_channel(launcher, timeout_s, notify)
    infos = shake_hands(channel, launcher, own_launcher_info(launcher, address, settings), timeout_s, notify)
    if launcher.leads:
        return Leader(launcher, launch, infos, channel)
    if launcher.started_by == "paceline":
        notify(
            f"host {launcher.number} of {launcher.launchers}: host 0 ({infos[0].host}) leads, and shows what is done"
        )
    follow(channel, launcher, launch)
    return None


def _all_finished(job: Job) -> bool:
    """Whether every run did all it set out to do: a process that dies after that has not failed."""
    return all((folder.path / FINISHED_FILE).exists() for _, folder in job.runs)
