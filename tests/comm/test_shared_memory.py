"""All-reduce through shared memory: means, safe writes, no leaks, and errors when a peer dies."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from comm.groups.test_timed import open_timed, rows_of
from paceline.comm import Comm, close_comm
from paceline.comm.shared_memory import futex, host_memory
from paceline.comm.shared_memory.buckets import CHUNK_BYTES, SharedBuckets
from paceline.comm.shared_memory.futex import FutexWords
from paceline.comm.shared_memory.host_memory import HostMemory, Peer, start_ticks_of
from paceline.comm.shared_memory.progress_counters import PEER_CHECK_S, READY, REDUCED, ProgressCounters
from paceline.errors import RankError
from paceline.records.timeline import Purpose
from ranks import SIZE, Pool
from tries import eventually

pytestmark = pytest.mark.takes(7)

BUCKETS = [(1, torch.float32), (70_001, torch.float64), (1000, torch.bfloat16), (3 * CHUNK_BYTES // 4, torch.float32)]
HOSTS = {
    1: [((0,),)],
    2: [((0, 1),), ((0,), (1,))],
    3: [((0, 1, 2),), ((0, 2), (1,))],
    4: [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 3), (1, 2))],
}
"""Ranks of this machine as one host, or as if they were on several."""


def values(rank: int, step: int, items: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's values: small integers that all dtypes represent exactly."""
    return ((torch.arange(items) + 7 * rank + step) % 16 * 12).to(dtype)


def on_hosts(comm: Comm, hosts: tuple[tuple[int, ...], ...]) -> Comm:
    return replace(comm, hosts=hosts)


def maps() -> int:
    """Return the number of shared memory mappings of this process."""
    return Path("/proc/self/maps").read_text().count(f"memfd:{host_memory.MEMFD_NAME}")


def means(comm: Comm, hosts: tuple[tuple[int, ...], ...], thread: bool) -> list[str]:
    """Return the wrong means of five steps in which ranks are late at random."""
    wrong, (items, dtypes) = [], zip(*BUCKETS, strict=True)
    chance = random.Random(comm.rank)
    buckets = SharedBuckets(items, dtypes, on_hosts(comm, hosts), thread=thread)
    for step in range(5):
        for number, (count, dtype) in enumerate(BUCKETS):
            buckets.rows[number].copy_(values(comm.rank, step, count, dtype))
            buckets.mark_ready(number)
            if number % 2:
                buckets.progress()
        for number, (count, dtype) in enumerate(BUCKETS):
            buckets.wait(number)
            time.sleep(chance.choice([0, 0, 0.005]))  # A late rank still finds the right mean.
            expected = sum(values(rank, step, count, torch.float64) for rank in range(comm.world_size))
            off = buckets.means[number].double() - expected / comm.world_size
            if off.abs().max() > (1.0 if dtype is torch.bfloat16 else 1e-4):
                wrong.append(f"step {step}, bucket {number}: {off.abs().max()}")
    buckets.close()
    return [*wrong, *([] if maps() == 0 else ["memory is still mapped"])]


@pytest.mark.parametrize(
    ("ranks", "hosts", "thread"),
    [(ranks, hosts, False) for ranks, every in HOSTS.items() for hosts in every] + [(4, ((0, 1, 3), (2,)), True)],
)
def test_every_rank_gets_the_mean(pool: Pool, ranks: int, hosts: tuple[tuple[int, ...], ...], thread: bool) -> None:
    assert pool.run(means, ranks, hosts, thread) == [[]] * ranks


def sent_over_nccl(_: Comm) -> list[object]:
    """Compute means on two hosts; return the operations of the strategy's group, which stands for one of NCCL."""
    timed = open_timed(SIZE)
    assert timed is not None
    comm = replace(timed, backend="nccl", stopwatch=None, hosts=((0, 1), (2, 3)))
    wrong: list[str] = []
    rows = rows_of(timed, lambda: wrong.extend(means(comm, comm.hosts, thread=False)))
    groups = {comm.through_main_memory().group for _ in range(2)}
    close_comm(timed)
    sent = [row for row in rows if row[2] is not Purpose.CONTROL]
    return [*wrong, *sent, *([] if len(groups) == 1 and timed.group not in groups else ["not one group"])]


def test_nccl_sends_no_main_memory_between_hosts(pool: Pool) -> None:
    assert pool.run(sent_over_nccl, SIZE) == [[]] * SIZE


def many_steps(comm: Comm, items: int) -> list[int]:
    """Return the steps in which a mean was overwritten before it was read; ranks take turns to be late."""
    buckets, wrong = SharedBuckets([items] * 2, [torch.float32] * 2, comm), []
    for step in range(120):
        for number in range(2):
            if (step + number) % comm.world_size == comm.rank:
                time.sleep(0.001)
            buckets.rows[number].fill_(float(step + comm.rank))
            buckets.mark_ready(number)
            if (step + number) % comm.world_size != comm.rank:  # Sometimes a rank reduces late.
                buckets.progress()
        if step % comm.world_size == comm.rank:
            time.sleep(0.002)
        for number in range(2):
            buckets.wait(number)
        if (step + 1) % comm.world_size == comm.rank:
            time.sleep(0.001)  # The other ranks continue with the next step.
        expected = torch.full((items,), step + (comm.world_size - 1) / 2)
        if not all(torch.equal(mean, expected) for mean in buckets.means):
            wrong.append(step)
    buckets.close()
    return wrong


@pytest.mark.parametrize("items", [40, CHUNK_BYTES // 2])
def test_a_slow_reader_is_not_overtaken(pool: Pool, items: int) -> None:
    assert pool.run(many_steps, 3, items) == [[]] * 3


def open_and_close_often(comm: Comm) -> tuple[int, int, list[str]]:
    """Return the mappings and open files left after twenty uses, and the names in /dev/shm during the last one."""
    for _ in range(20):
        buckets = SharedBuckets([1000], [torch.float32], comm)
        assert maps() > 0
        named = [file.name for file in Path("/dev/shm").iterdir() if host_memory.MEMFD_NAME in file.name]
        buckets.close()
    targets = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return maps(), sum("memfd" in target for target in targets), named


def test_nothing_is_left_behind(pool: Pool) -> None:
    assert pool.run(open_and_close_often, 3) == [(0, 0, [])] * 3


def test_only_the_owner_can_open_the_memory_and_nobody_can_resize_it() -> None:
    file = host_memory._create(8192, b"t" * host_memory.TOKEN_BYTES)
    try:
        assert stat.S_IMODE(os.fstat(file).st_mode) == 0o600
        assert fcntl.fcntl(file, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with pytest.raises(PermissionError):
            os.ftruncate(file, 0)
    finally:
        os.close(file)


@pytest.mark.parametrize("wrong", [{"size": 4096}, {"token": "00" * host_memory.TOKEN_BYTES}, {"pid": 2**22}])
def test_memory_that_fails_verification_is_refused(wrong: dict[str, object]) -> None:
    token = os.urandom(host_memory.TOKEN_BYTES)
    file = host_memory._create(8192, token)
    try:
        created = host_memory.SharingProcess(
            pid=os.getpid(), start_ticks="", file=file, token=token.hex(), size=8192, problem=""
        )
        host_memory._map(created, -1).close()
        with pytest.raises(
            OSError, match=r"has the wrong size, owner or permissions|does not contain the expected token|No such file"
        ):
            host_memory._map(msgspec.structs.replace(created, **wrong), -1)
    finally:
        os.close(file)


def no_memory(comm: Comm) -> str:
    if comm.rank == 1:
        host_memory._map = refused  # type: ignore[assignment]
    try:
        SharedBuckets([10], [torch.float32], comm)
    except Exception as error:
        return str(error)
    finally:
        host_memory._map = _MAP
    return "no error"


_MAP = host_memory._map


def refused(*_: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_every_rank_names_the_rank_that_cannot_share_memory(pool: Pool) -> None:
    said = "rank 1 cannot share memory with the ranks of its host: Permission denied."
    assert pool.run(no_memory, 3) == [said] * 3


# Two ranks in one process: their counters behave as if they were in two.


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[ProgressCounters, ProgressCounters]]]:
    """Return a function that creates the counters of rank 0 and of rank 1, whose process may be another one."""
    made: list[ProgressCounters] = []
    memory = mmap.mmap(-1, mmap.PAGESIZE)

    def make(pid: int = os.getpid(), timeout_s: float = 30.0) -> tuple[ProgressCounters, ProgressCounters]:
        peers = (Peer(0, os.getpid(), start_ticks_of(os.getpid())), Peer(1, pid, start_ticks_of(pid)))
        made.extend(ProgressCounters(HostMemory(memory, peers, rank), 0, rank, timeout_s) for rank in range(2))
        return made[0], made[1]

    yield make
    for progress in made:
        progress._words.release()
    memory.close()


def test_waiting_takes_no_cpu_time(pair: Callable[..., tuple[ProgressCounters, ProgressCounters]]) -> None:
    here, there = pair()
    later = threading.Timer(1.0, lambda: there.increment(READY))
    later.start()
    since_s, busy_s = time.perf_counter(), time.process_time()
    here.wait(here.counters_of_all(READY)[1:], 1)
    assert time.perf_counter() - since_s > 0.9
    assert time.process_time() - busy_s < 0.05
    later.join()


def test_a_killed_peer_is_noticed_and_named(pair: Callable[..., tuple[ProgressCounters, ProgressCounters]]) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        here, _ = pair(process.pid)
        threading.Timer(0.2, process.send_signal, [signal.SIGKILL]).start()
        since_s = time.perf_counter()
        with pytest.raises(RankError, match="rank 1 ended while rank 0 waited for its gradients"):
            here.wait(here.counters_of_all(REDUCED)[1:], 1)
        assert time.perf_counter() - since_s < 25, "before the time-out"


@pytest.mark.timing
def test_a_killed_peer_is_noticed_within_2_s(pair: Callable[..., tuple[ProgressCounters, ProgressCounters]]) -> None:
    def check(_: int) -> None:
        with subprocess.Popen(["sleep", "60"]) as process:
            here, _ = pair(process.pid)
            process.kill()
            process.wait()
            since_s = time.perf_counter()
            with pytest.raises(RankError, match="rank 1 ended"):
                here.wait(here.counters_of_all(REDUCED)[1:], 1)
            assert time.perf_counter() - since_s < 2

    eventually(check)


def test_another_process_with_the_same_pid_is_not_the_peer() -> None:
    assert Peer(0, os.getpid(), start_ticks_of(os.getpid())).is_alive
    assert not Peer(0, os.getpid(), "1").is_alive
    assert start_ticks_of(2**22 + 1) == ""


def test_a_peer_that_has_left_is_noticed(pair: Callable[..., tuple[ProgressCounters, ProgressCounters]]) -> None:
    here, there = pair()
    there.close()
    with pytest.raises(RankError, match="rank 1 ended"):
        here.wait(here.counters_of_all(READY)[1:], 1)


class WordsWithEvent:
    """`FutexWords` that call a function right after one of the calls of `has_reached`."""

    def __init__(self, words: FutexWords, after: int, then: Callable[[], None]) -> None:
        self._words, self._after, self._then = words, after, then

    def __getattr__(self, name: str) -> object:
        return getattr(self._words, name)

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def has_reached(self, index: int, value: int) -> bool:
        """Return the result of the words, then call the function if this was the chosen call."""
        found = self._words.has_reached(index, value)
        self._after -= 1
        if self._after == 0:
            self._then()
        return found


def test_a_peer_may_leave_once_it_has_done_its_part(
    pair: Callable[..., tuple[ProgressCounters, ProgressCounters]],
) -> None:
    here, there = pair()
    here._spins = False

    def end() -> None:
        there.increment(READY)
        there.close()

    # Between the check after a sleep and the check whether the peer is alive.
    here._words = WordsWithEvent(here._words, 2, end)  # type: ignore[assignment]
    here.wait(here.counters_of_all(READY)[1:], 1)


def test_a_peer_that_never_arrives_is_a_timeout(pair: Callable[..., tuple[ProgressCounters, ProgressCounters]]) -> None:
    here, _ = pair(timeout_s=3 * PEER_CHECK_S)
    with pytest.raises(RankError, match="rank 0 waited 0 s for the gradients of rank 1"):
        here.wait(here.counters_of_all(READY)[1:], 1)


def test_the_error_of_a_thread_is_raised(pair: Callable[..., tuple[ProgressCounters, ProgressCounters]]) -> None:
    here, _ = pair()

    def fail(_: object) -> None:
        raise RuntimeError("the ring is broken")

    here.start_thread("fails", fail)
    with pytest.raises(RuntimeError, match="the ring is broken"):
        here.wait(here.counters_of_all(READY)[1:], 1)


@pytest.mark.parametrize("known", [True, False])
def test_words_overflow_to_zero(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Words work with futexes, and on platforms without a known futex call."""
    if not known:
        monkeypatch.setattr(futex, "_system_call", lambda: None)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    words = FutexWords(memory, 0, 8)
    memory[8:12] = (2**32 - 2).to_bytes(4, "little")
    assert not words.has_reached(2, 2**32 - 1)
    for _ in range(3):
        words.add(2)
    assert words[2] == 1
    assert words.has_reached(2, 2**32 + 1)
    assert not words.has_reached(2, 2**32 + 2)
    threading.Timer(0.05, lambda: words.add(2)).start()
    since_s = time.perf_counter()
    while not words.has_reached(2, 2):
        words.wait(2, words[2], 20.0)
    assert time.perf_counter() - since_s < 15, "it was woken"
    words.release()
    memory.close()
