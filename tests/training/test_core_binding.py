"""Tests of ranks that are bound to cores."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from cli.test_train import train
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.experiments.checks import check_strategy
from paceline.measure.cores import affine_cores
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create
from paceline.training import core_binding
from paceline.training.core_binding import MASK_BYTES, bound_to, cores_of_rank, mask_of, usable_cores_in_order
from paceline.training.placement import Placement
from ranks import SIZE, Pool

CORES = os.sched_getaffinity(0)
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [{0, 1, 2, 3, 4}]),
        (2, [{0, 1}, {2, 3}]),
        (5, [{0}, {1}, {2}, {3}, {4}]),
    ],
)
def test_ranks_get_equal_parts_without_common_cores(ranks: int, expected: list[set[int]]) -> None:
    assert [cores_of_rank(number, ranks, range(5)) for number in range(ranks)] == expected


def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(UsageError, match="3 ranks share 2 cores"):
        cores_of_rank(0, 3, [0, 1])


def test_hardware_threads_of_a_core_are_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages of two cores with two threads each, numbered as Linux does: the second threads last."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(core_binding, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores_in_order() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_emulated_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_binding, "emulation_info", lambda _: object())
    with pytest.raises(UsageError, match="emulated hosts have no cores of their own"):
        check_strategy(RunConfig(bind_to="core"), create("ddp"), ranks=2)
    check_strategy(RunConfig(), create("ddp"), ranks=2)


def test_all_threads_are_bound_and_released() -> None:
    """Threads that were there before, threads that start meanwhile, and the main thread."""
    seen: dict[str, set[int]] = {}
    go, done = threading.Event(), threading.Event()

    def note(name: str) -> None:
        seen[name] = os.sched_getaffinity(0)

    def wait_then_note() -> None:
        go.wait()
        note("older")
        done.set()

    older = threading.Thread(target=wait_then_note)
    older.start()
    one = frozenset([min(CORES)])
    with bound_to(one):
        go.set()
        done.wait()
        newer = threading.Thread(target=note, args=["newer"])
        newer.start()
        newer.join()
        note("main")
    older.join()
    assert seen == dict.fromkeys(["older", "newer", "main"], one)
    assert os.sched_getaffinity(0) == CORES
    with bound_to(None):
        assert os.sched_getaffinity(0) == CORES


def test_released_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), bound_to(frozenset([min(CORES)])):
        _ = 1 / 0
    assert os.sched_getaffinity(0) == CORES
    assert affine_cores() == len(CORES)


@pytest.mark.parametrize(
    ("roles", "masks", "expected"),
    [
        ([Role.WORKER] * 4, [{0, 1, 2, 3}] * 4, [{0}, {1}, {2}, {3}]),
        ([Role.IDLE, Role.WORKER, Role.SERVER, Role.IDLE], [{0, 1, 2, 3}] * 4, [None, {0, 1}, {2, 3}, None]),
        ([Role.WORKER] * 4, [{0, 1}, {4, 5}] * 2, [{0}, {4}, {1}, {5}]),  # As Slurm binds them to two sockets.
        ([Role.WORKER] * 4, [{0}, {1}, {2, 3}, {4}], [{0}, {1}, {2, 3}, {4}]),
    ],
)
def test_ranks_divide_the_cores_that_they_share(
    pool: Pool, roles: list[Role], masks: list[set[int]], expected: list[set[int] | None]
) -> None:
    assert pool.run(placed_cores, SIZE, roles, masks) == expected


def placed_cores(_: Comm, roles: list[Role], masks: list[set[int]]) -> set[int] | None:
    """Return the cores of this rank, if each rank may use those of its mask."""
    rank = dist.get_rank()
    world = World(rank, SIZE, rank, SIZE, interface="lo", ranks_sharing_cores=SIZE, store=None)  # type: ignore[arg-type]
    assert Placement.choose(RunConfig(device="cpu"), world, roles, None).cores is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: masks[rank])
        patch.setattr(core_binding, "TOPOLOGY", Path("/nothing"))
        cores = Placement.choose(RunConfig(device="cpu", bind_to="core"), world, roles, None).cores
    return None if cores is None else set(cores)


def test_masks_tell_cores_apart() -> None:
    assert len(mask_of([])) == len(mask_of([8191])) == MASK_BYTES
    assert len({mask_of([0, 1]), mask_of([0]), mask_of([8191]), mask_of([1, 64])}) == 4


def test_threads_get_back_their_own_cores() -> None:
    """A launcher or a library may have bound single threads before."""
    go, done = threading.Event(), threading.Event()
    seen: list[set[int]] = []

    def bind_itself_then_note() -> None:
        os.sched_setaffinity(0, {max(CORES)})
        done.set()
        go.wait()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bind_itself_then_note)
    thread.start()
    done.wait()
    with bound_to(frozenset([min(CORES)])):
        pass
    go.set()
    thread.join()
    assert seen == [{max(CORES)}]
    assert os.sched_getaffinity(0) == CORES


def test_cores_that_do_not_exist_are_an_error_in_words() -> None:
    with pytest.raises(UsageError, match="ranks cannot be bound"), bound_to(frozenset([8000])):
        raise AssertionError("the block must not run")


@needs_two_cores
def test_a_run_trains_on_cores_of_its_own(tmp_path: Path) -> None:
    """The steps of each rank print the cores that they may use, to the rank's log."""
    out = tmp_path / "run"
    options = ("--ranks", "2", "--batch", "8", "--steps", "2", "--no-evaluate", "--device", "cpu", "--out", str(out))
    train("user_workloads:prints_its_cores", *options, "--bind-to", "core")
    first, second = (_last_cores(file.read_text()) for file in (out / "logs").glob("rank-*"))
    assert len(first) == len(second) == len(CORES) // 2
    assert not first & second


def _last_cores(log: str) -> set[int]:
    """Return the cores of the last step; the model is checked before ranks are bound."""
    printed = [line.split()[1:] for line in log.splitlines() if line.startswith("cores")]
    return set(map(int, printed[-1]))
