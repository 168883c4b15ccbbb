"""Leader: the launcher process that decides which jobs all launcher processes run.

On several hosts the same command runs on each, and launcher 0 is the leader. It posts a job; every launcher that
participates starts its ranks with torch's elastic launcher and reports how they ended. Each job has a separate store
for the rendezvous of its ranks. A host that does not share the leader's disk sends the files that its ranks wrote.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.network import LOOPBACK, source_address
from paceline.comm.stores.signed import SignedStore
from paceline.comm.stores.stop_request import request_stop
from paceline.config import LaunchConfig
from paceline.errors import LaunchError, PacelineError
from paceline.formatting import short_seconds
from paceline.launch import rendezvous
from paceline.launch.channel.control_store import open_channel
from paceline.launch.channel.handshake import own_launcher_info, run_handshake
from paceline.launch.channel.heartbeat import HeartbeatMonitor
from paceline.launch.channel.own_command import OwnCommand
from paceline.launch.channel.store_channel import POLL_S, StoreChannel
from paceline.launch.channel.token import TokenSource
from paceline.launch.elastic import STOP_GRACE_S, start_ranks
from paceline.launch.faults.failures import error_from_info, find_root_cause
from paceline.launch.faults.hang_watch import HangWatch
from paceline.launch.faults.stop_signals import EarlyStop, GracefulStop
from paceline.launch.follower import (
    END,
    JobOutcome,
    LaunchEnd,
    PostedJob,
    end_read_key,
    failed_key,
    files_key,
    finished_key,
    follow,
    job_key,
    outcome_key,
    stop_key,
)
from paceline.launch.job import Job
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, Notify, RankRange, Shape
from paceline.launch.rank_assignment import assign_ranks
from paceline.records.schema import FINISHED_FILE
from paceline.signing import Signer

OUTCOME_S = 60.0
"""Seconds in which a follower must report how its ranks ended, once they have ended elsewhere."""
FOLLOWERS_FINISH_S = 8.0
"""Seconds in which followers can stop their ranks before the leader ends, once they have read that it ends."""


@dataclass
class Leader:
    """Runs jobs on all launchers. A context manager, whose exit ends the followers."""

    launcher: LauncherProcess
    launch: LaunchConfig
    launcher_infos: list[LauncherInfo]
    channel: StoreChannel | None
    """Channel to the followers; None if there are none."""
    notify: Notify
    jobs: int = 0
    """Number of jobs started so far."""
    stop_requested: bool = False
    """Whether a signal asked the ranks of the last job to stop."""
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    """Signal that asked to stop while no ranks ran."""
    own_signer: Signer = field(default_factory=Signer.random)
    """Key of a launch without followers."""

    def __post_init__(self) -> None:
        self._heartbeats = None if self.channel is None else HeartbeatMonitor(self.channel, self._followers)
        self._watch: HangWatch | None = None

    @property
    def _job_signer(self) -> Signer:
        """Signer of the current job; followers derive the same key."""
        signer = self.own_signer if self.channel is None else self.channel.signer
        return signer.derive("job", str(self.jobs))

    @property
    def _followers(self) -> list[int]:
        return [launcher_info.launcher for launcher_info in self.launcher_infos[1:]]

    def run(self, job: Job, shape: Shape) -> None:
        """Start a job's ranks on the first hosts, and wait for all of them. Raise the root cause if ranks failed."""
        self._check_followers()
        self.jobs += 1
        rank_ranges = assign_ranks(shape, self.launcher, self.launcher_infos)
        if self.channel is not None:
            job = job.with_paths(lambda path: path.resolve())  # Other hosts may run in another working directory.
        job.write()
        finished_before = _finished_files(job)
        listener = rendezvous.bind(*self._rendezvous_address(rank_ranges))
        address, port = listener.getsockname()[:2]
        endpoint = rendezvous.format_endpoint(address, port)
        # The store must exist until all launchers have reported the end of their ranks, which are connected to it.
        opened = rendezvous.open_store(address, port, listener, timedelta(seconds=job.timeout))
        store = SignedStore(opened, self._job_signer, self.notify)
        if self.channel is not None:
            posted = PostedJob(rank_ranges=rank_ranges, endpoint=endpoint, file=job.file, job=job.to_json())
            self.channel.release()
            self.channel.keep(job_key(self.jobs), posted)
        self._watch = HangWatch(job, rank_ranges, self._names_of(rank_ranges))
        with self._watch.watching(address, port, self._job_signer):
            codes, failure = self._start_own_ranks(job, rank_ranges[0], endpoint, store)
        for rank_range in rank_ranges[1:]:
            others, reason = self._wait_for_outcome(rank_range, job, failed=bool(codes or failure))
            codes |= others
            failure = reason or failure  # A launcher that could not start its ranks is why the others failed.
        # Ranks that stop on request end without an exit code, since torch's launcher would end the others at once.
        ended_early = codes or failure or any(job.folder.error_file(rank).exists() for rank in range(shape.ranks))
        if ended_early and len(_finished_files(job) - finished_before) < len(job.runs):
            self._check_followers(after_failure=True)
            raise self._watch.error() or failure or find_root_cause(codes, job.folder, range(shape.ranks))

    @property
    def lost_hosts(self) -> list[LauncherInfo]:
        """Launchers of hosts that do not answer; a host counts as lost with one of its launchers."""
        lost = set() if self._heartbeats is None else self._heartbeats.lost()
        nodes = {launcher_info.node for launcher_info in self.launcher_infos if launcher_info.launcher in lost}
        return [launcher_info for launcher_info in self.launcher_infos if launcher_info.node in nodes]

    def drop_lost_hosts(self) -> int:
        """Go on without the hosts that do not answer; return the number of those left."""
        dropped = {launcher_info.launcher for launcher_info in self.lost_hosts}
        self.launcher_infos = [info for info in self.launcher_infos if info.launcher not in dropped]
        if self._heartbeats is not None:
            self._heartbeats.forget(dropped)
        return len({launcher_info.node for launcher_info in self.launcher_infos})

    def __enter__(self) -> Leader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Post the end, with the error if there is one, and wait until the followers have read it."""
        if self.channel is None or self._heartbeats is None:
            return
        with contextlib.suppress(LaunchError):
            self.channel.keep(END, LaunchEnd.of(error))
            deadline = time.monotonic() + FOLLOWERS_FINISH_S
            waiting = {*self._followers}
            # A follower that sends heartbeats reads the end, on a busy host late: without it, it reports a lost host 0.
            while waiting := waiting - self._heartbeats.lost():
                key = finished_key if time.monotonic() < deadline else end_read_key
                waiting = {follower for follower in waiting if not self.channel.has(key(follower))}
                time.sleep(POLL_S if waiting else 0.0)

    def _rendezvous_address(self, rank_ranges: Sequence[RankRange]) -> tuple[str, int]:
        """Return the address and port (0: any) for a job's rendezvous: no more hosts can connect than must.

        The address is the one on the route to the first participating other host. If all launchers share a network, it
        is the loopback address. Without followers it is `--master`, if given.
        """
        if self.channel is None:
            return rendezvous.parse_master(self.launcher.master) if self.launcher.master else (LOOPBACK, 0)
        infos = [self._info(rank_range.launcher) for rank_range in rank_ranges]
        others = [info for info in infos if info.network != self.launcher_infos[0].network]
        return source_address(others[0].address) if others else LOOPBACK, 0

    def _names_of(self, rank_ranges: Sequence[RankRange]) -> dict[int, str]:
        """Return the names of the hosts of ranks, by launcher, if there are several."""
        infos = [self._info(rank_range.launcher) for rank_range in rank_ranges]
        return {info.launcher: info.name for info in infos} if len({info.node for info in infos}) > 1 else {}

    def _info(self, launcher: int) -> LauncherInfo:
        return next(info for info in self.launcher_infos if info.launcher == launcher)

    def _start_own_ranks(
        self, job: Job, rank_range: RankRange, endpoint: str, store: Store
    ) -> tuple[dict[int, int], PacelineError | None]:
        """Run the leader's ranks; return the exit codes of those that failed, or the error if none could start."""
        codes: dict[int, int] = {}
        failure: PacelineError | None = None
        stop = GracefulStop(
            request=lambda: request_stop(store),
            is_requested_elsewhere=lambda: self.channel is not None and self.channel.has(stop_key(self.jobs)),
            grace_s=self.launch.grace,
            notify=self.notify,
            early=self.early_stop,
        )
        try:
            codes = start_ranks(
                job,
                rank_range,
                endpoint,
                store=store,
                signer=self._job_signer,
                threads=self.launch.threads,
                remote_failed=self._remote_failed,
                stop=stop if job.stops_on_request else None,
            )
        except LaunchError as error:
            failure = error
        self.stop_requested = stop.requested
        if self.channel is not None and (codes or failure):
            self.channel.keep(failed_key(self.jobs), rank_range.launcher)
        return codes, failure

    def _remote_failed(self) -> float | None:
        """Return whether ranks of a follower failed or hang, or a follower is lost, and how long others may go on."""
        if self._watch is not None and self._watch.hang is not None:
            return 0.0
        if self.channel is None or self._heartbeats is None:
            return None
        failed = self.channel.has(failed_key(self.jobs))
        if self._heartbeats.lost(after_failure=failed):
            return 0.0  # The other ranks wait for ranks that do not answer.
        return STOP_GRACE_S if failed else None

    def _wait_for_outcome(
        self, rank_range: RankRange, job: Job, *, failed: bool
    ) -> tuple[dict[int, int], PacelineError | None]:
        """Return the exit codes of a follower's failed ranks, or the error if it could not start them.

        Return neither if the follower is lost.
        """
        assert self.channel is not None
        assert self._heartbeats is not None
        key = outcome_key(self.jobs, rank_range.launcher)
        timeout_s = OUTCOME_S + (0.0 if failed else job.timeout)
        deadline = time.monotonic() + timeout_s
        while (outcome := self.channel.wait(key, JobOutcome, within_s=0.5)) is None:
            failed = failed or self.channel.has(failed_key(self.jobs))
            if rank_range.launcher in self._heartbeats.lost(after_failure=failed):
                return {}, None
            if time.monotonic() > deadline:
                name = self._info(rank_range.launcher).name
                return {}, LaunchError(
                    f"{name} did not report within {short_seconds(timeout_s)} how its ranks ended.",
                    hint="see the output of the command on that host",
                )
        if outcome.sends_files:
            self.channel.receive_files(files_key(self.jobs, rank_range.launcher), Path("/"), job.folders)
        return outcome.codes, None if outcome.error is None else error_from_info(outcome.error)

    def _check_followers(self, *, after_failure: bool = False) -> None:
        """Raise `LaunchError` if a follower is lost, so that the failure is not attributed to a strategy."""
        lost = set() if self._heartbeats is None else self._heartbeats.lost(after_failure=after_failure)
        if lost:
            names = dict.fromkeys(self._info(launcher).name for launcher in sorted(lost))
            situation = "" if self._watch is None else self._watch.situation()
            raise LaunchError(
                f"lost contact with {' and '.join(names)}{f': {situation}' if situation else ''}.",
                hint="see the output of the command on that host",
            )


def join_launch(
    launcher: LauncherProcess,
    launch: LaunchConfig,
    settings: Mapping[str, Any],
    command: OwnCommand,
    *,
    timeout_s: float,
    notify: Notify,
) -> Leader | None:
    """Run the handshake with all launchers. On launcher 0, return the `Leader`; on followers, run jobs to the end.

    Followers return None after the last job. They run only jobs of `command`.
    """
    token = TokenSource(launcher, launch, timeout_s, notify)
    if launcher.launchers == 1:
        return Leader(launcher, launch, [own_launcher_info(launcher, LOOPBACK, settings)], None, notify)
    channel, address = open_channel(launcher, token, timeout_s, notify)
    launcher_infos = run_handshake(channel, launcher, own_launcher_info(launcher, address, settings), timeout_s, notify)
    token.forget()
    if launcher.is_leader:
        return Leader(launcher, launch, launcher_infos, channel, notify)
    if launcher.started_by == "paceline":
        notify(
            f"host {launcher.number} of {launcher.launchers}: connected; host 0 ({launcher_infos[0].host}) is the "
            "leader and shows the progress"
        )
    follow(channel, launcher, launch, command)
    return None


def _finished_files(job: Job) -> set[tuple[Path, int]]:
    """Return a file, with its time, for each run of a job that is complete.

    A process that dies after it has written one does not count as failed. An earlier attempt at a run that resumes may
    have left one: it has another time than the one that this job writes.
    """
    files = (folder.path / FINISHED_FILE for _, folder in job.runs)
    return {(file, file.stat().st_mtime_ns) for file in files if file.exists()}
