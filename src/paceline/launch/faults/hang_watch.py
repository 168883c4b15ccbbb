"""Watch of a job for hangs, in a thread of the leader, which has the store that ranks report to.

The thread has its own connection to the store, in the same process, so that it never waits for a host that is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.comm.stores.signed import SignedStore
from paceline.comm.watchdog.description import Surroundings, all_stacks, hang_error, sentence, when
from paceline.comm.watchdog.judge import SILENT_BEATS, Hang, HangJudge
from paceline.comm.watchdog.reporter import beat_period_s, connect
from paceline.comm.watchdog.status import RankStatus
from paceline.comm.watchdog.store_reader import StatusReader
from paceline.errors import HangError
from paceline.launch.faults.native_crash import read_stack
from paceline.launch.faults.process_states import ProcessState, StatesReport, read_states
from paceline.launch.job import Job
from paceline.launch.launcher_process import RankRange
from paceline.measure.process_use import CpuTime
from paceline.records.growing_file import full_disk_error
from paceline.records.schema import ERRORS_FOLDER
from paceline.signing import Signer

STACKS_FILE = "hang.txt"
JOIN_S = 2.0


@dataclass
class HangWatch:
    """Watch of the ranks of one job."""

    job: Job
    rank_ranges: Sequence[RankRange]
    hosts: Mapping[int, str]
    """Name of the host of each launcher; empty if there is only one host."""
    hang: Hang | None = None
    """The hang, once there is one."""
    _states: dict[int, ProcessState] = field(default_factory=dict)
    """States of the processes of silent ranks."""

    def __post_init__(self) -> None:
        ranks = sum(rank_range.ranks for rank_range in self.rank_ranges)
        self._judge = HangJudge(ranks, self.job.hang_timeout, self.job.timeout)
        self._reader = StatusReader(ranks)
        self._reports: dict[int, tuple[StatesReport, float]] = {}
        """Last report of each launcher on its processes, and when it arrived."""

    @contextmanager
    def watching(self, address: str, port: int, signer: Signer) -> Iterator[None]:
        """Watch for the duration of a `with` block; `signer` has the key of the job."""
        if not self.job.hang_timeout:
            yield
            return
        done = threading.Event()

        def watch() -> None:
            with suppress(RuntimeError):  # The store is gone: the job has ended.
                store = connect(address, port, signer)
                while self.hang is None and not done.wait(beat_period_s(self.job.hang_timeout) / 2):
                    self._look(store)

        watcher = threading.Thread(target=watch, daemon=True, name="paceline-hang-watch")
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join(JOIN_S)

    def error(self) -> HangError | None:
        """Return the error of the hang, None if there was none; write the stacks of all ranks to a file."""
        if self.hang is None:
            return None
        around = self._surroundings(self.hang)
        file: Path | None = self.job.folder.path / ERRORS_FOLDER / STACKS_FILE
        assert file is not None
        try:
            with full_disk_error(file):
                file.write_text(all_stacks(self.hang, around))
        except Exception:  # The error matters more than its file.
            file = None
        return hang_error(self.hang, around, file)

    def situation(self) -> str:
        """Return what ranks did when they were last seen, in words; empty if they went on until the end."""
        hang = self.hang or self._judge.last_seen()
        least_s = SILENT_BEATS * beat_period_s(self.job.hang_timeout)
        if not hang.statuses or (self.hang is None and min(hang.stalled_s.values()) < least_s):
            return ""
        return f"{when(hang)}: {sentence(hang, self._surroundings(hang))}"

    def _look(self, store: SignedStore) -> None:
        statuses = self._reader.read(store)
        silent, before = self._judge.silent(), self._states
        # Also while all ranks report: it must be known when the last report of a launcher arrived.
        states = self._read_states(store, statuses)
        self._states = {rank: state for rank, state in states.items() if rank in silent}
        busy = {rank for rank in silent if self._ran(rank, before)}
        self.hang = self._judge.observe(statuses, busy)

    def _ran(self, rank: int, before: Mapping[int, ProcessState]) -> bool:
        """Return whether the process of a rank has used much of a core since the last look."""
        if rank not in before or rank not in self._states:
            return False
        now, then = (CpuTime(state.ran_s, state.waited_s) for state in (self._states[rank], before[rank]))
        return now.shows_work_since(then, beat_period_s(self.job.hang_timeout))

    def _read_states(self, store: SignedStore, statuses: Mapping[int, RankStatus]) -> dict[int, ProcessState]:
        states: dict[int, ProcessState] = {}
        for rank_range in self.rank_ranges:
            by_process = self._recent_states(store, rank_range.group_rank)
            for rank in range(rank_range.first_rank, rank_range.first_rank + rank_range.ranks):
                if rank in statuses and statuses[rank].pid in by_process:
                    states[rank] = by_process[statuses[rank].pid]
        return states

    def _recent_states(self, store: SignedStore, group_rank: int) -> Mapping[int, ProcessState]:
        """Return the states that a launcher reports, none if its last report is old.

        A report counts if it is newer than the last one: anyone can post an old one again.
        """
        now_s, report = time.monotonic(), read_states(store, group_rank)
        if group_rank not in self._reports or report.number > self._reports[group_rank][0].number:
            self._reports[group_rank] = report, now_s
        last, arrived_s = self._reports[group_rank]
        return {} if now_s - arrived_s > SILENT_BEATS * beat_period_s(self.job.hang_timeout) else last.states

    def _surroundings(self, hang: Hang) -> Surroundings:
        hosts = {
            rank: self.hosts[rank_range.launcher]
            for rank_range in self.rank_ranges
            for rank in range(rank_range.first_rank, rank_range.first_rank + rank_range.ranks)
            if rank_range.launcher in self.hosts
        }
        stacks = {rank: read_stack(self.job.folder.log_file(rank)) for rank in hang.silent_s}
        checks = any(config.check_collectives for config, _ in self.job.runs)
        letters = {rank: state.letter for rank, state in self._states.items()}
        return Surroundings(letters, hosts, {rank: stack for rank, stack in stacks.items() if stack}, checks)
