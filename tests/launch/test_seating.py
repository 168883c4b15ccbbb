"""Who starts which ranks."""

from __future__ import annotations

import pytest

from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.seat import Hello, Seat, Shape
from paceline.launch.seating import find_seat, parts_of


def hello(seat: int, node: int, *, local_rank: int = 0, cores: tuple[int, ...] = (0, 1)) -> Hello:
    return Hello(seat, node, local_rank, f"n{node}", f"net{node}", f"198.18.0.{node}", {}, list(cores), {})


HOSTS = [hello(number, number) for number in range(4)]
"""Four hosts, each with one process that starts its ranks."""
CYCLIC = [hello(seat, seat % 2, local_rank=seat // 2) for seat in range(4)]
"""Four ranks, dealt out over two hosts in turn."""


def test_a_host_starts_all_its_ranks() -> None:
    parts = parts_of(Shape(2, 3), Seat(seats=4), HOSTS)
    assert [(part.seat, part.first_rank, part.ranks, part.local_rank) for part in parts] == [(0, 0, 3, 0), (1, 3, 3, 0)]
    assert {(part.parts, part.local_size, part.sharing) for part in parts} == {(2, 3, 3)}


def test_ranks_of_one_host_stand_together_whatever_the_order_of_the_seats() -> None:
    seat = Seat(seats=4, ranks=1, local_size=2, launcher="torchrun")
    parts = parts_of(Shape(2, 2), seat, CYCLIC)
    assert [part.seat for part in parts] == [0, 2, 1, 3]
    assert [part.local_rank for part in parts] == [0, 1, 0, 1]
    assert [part.first_rank for part in parts] == [0, 1, 2, 3]
    assert [part.seat for part in parts_of(Shape(2, 1), seat, CYCLIC)] == [0, 1]
    assert [part.seat for part in parts_of(Shape(1, 2), seat, CYCLIC)] == [0, 2]


def test_ranks_share_cores_unless_each_is_bound_to_its_own() -> None:
    seat = Seat(seats=2, ranks=1, local_size=2, launcher="slurm")
    free = [hello(0, 0), hello(1, 0, local_rank=1)]
    bound = [hello(0, 0, cores=(0,)), hello(1, 0, local_rank=1, cores=(1,))]
    assert [part.sharing for part in parts_of(Shape(1, 2), seat, free)] == [2, 2]
    assert [part.sharing for part in parts_of(Shape(1, 2), seat, bound)] == [1, 1]


@pytest.mark.parametrize(("shape", "seat"), [(Shape(5, 1), Seat(seats=4)), (Shape(1, 3), Seat(seats=4, ranks=1))])
def test_more_than_there_is_cannot_be_had(shape: Shape, seat: Seat) -> None:
    with pytest.raises(UsageError, match="are asked for, but there are"):
        parts_of(shape, seat, HOSTS if seat.ranks is None else CYCLIC)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_the_seat_that_torchrun_gives() -> None:
    seat = find_seat(LaunchConfig(), TORCHRUN)
    assert (seat.number, seat.seats, seat.ranks, seat.node, seat.hosts) == (3, 4, 1, 1, 2)
    assert (seat.local_rank, seat.local_size, seat.leads) == (1, 2, False)
    assert find_seat(LaunchConfig(ranks=4), TORCHRUN) == seat


@pytest.mark.parametrize("asked", [{"ranks": 2}, {"ranks_per_host": 4}, {"hosts": 2, "master": "127.0.0.1:1"}])
def test_what_torchrun_did_not_start_is_refused(asked: dict[str, object]) -> None:
    name = next(iter(asked)).replace("_", "-")
    with pytest.raises(UsageError, match=f"--{name} .* was given, but the launcher started 4 ranks, 2 on this host"):
        find_seat(LaunchConfig(**asked), TORCHRUN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "x"), ("WORLD_SIZE", "0"), ("RANK", "-1"), ("RANK", "4"), ("RANK", ""), ("LOCAL_WORLD_SIZE", "0")],
)
def test_what_torchrun_would_never_say_is_told_by_name(name: str, value: str) -> None:
    with pytest.raises(LaunchError, match=rf"^{name} .*is '?{value}'?[,.]") as refused:
        find_seat(LaunchConfig(), TORCHRUN | {name: value})
    assert "torchrun sets it" in (refused.value.hint or "")


def test_the_seat_that_the_user_names() -> None:
    seat = find_seat(LaunchConfig(hosts=3, node_rank=2, master="198.18.0.1:29500"), {})
    assert (seat.number, seat.seats, seat.hosts, seat.ranks, seat.master) == (2, 3, 3, None, "198.18.0.1:29500")
    assert find_seat(LaunchConfig(), {}).leads
