"""Typed values that ranks send to each other as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from paceline.comm import Comm
from paceline.comm.messages.json_messages import as_bytes, gather_typed, receive_typed, send_typed
from paceline.strategies.parameter_server.staleness import Staleness
from ranks import Pool


class Sample(msgspec.Struct, frozen=True):
    """A value with text and a number."""

    text: str
    number: float | None


def exchange(value: Any, kind: Any) -> Callable[[Comm], Any]:
    """Return a function in which rank 0 sends a value, and rank 1 returns what it receives."""

    def run(comm: Comm) -> Any:
        if comm.rank == 0:
            send_typed(value, 1, comm.control.group, tag=3)
            return None
        return receive_typed(kind, 0, comm.control.group, tag=3)

    return run


def send_staleness(comm: Comm) -> Any:
    return exchange(Staleness({0: 4, 12: 1}, damped=1, dropped=2), Staleness)(comm)


def send_pairs(comm: Comm) -> Any:
    return exchange([("a:1", "b:2"), ("a:3", "c:4")], list[tuple[str, str]])(comm)


def gather_samples(comm: Comm) -> Any:
    own = Sample("caf\udce9", float("nan")) if comm.rank else Sample("a longer text", 0.5)
    return gather_typed(own, Sample, comm.control)


def test_a_value_arrives_as_its_type(pool: Pool) -> None:
    assert pool.run(send_staleness, 2)[1] == Staleness({0: 4, 12: 1}, damped=1, dropped=2)
    assert pool.run(send_pairs, 2)[1] == [("a:1", "b:2"), ("a:3", "c:4")]


def test_gathered_text_may_be_invalid_unicode_and_numbers_not_finite(pool: Pool) -> None:
    assert pool.run(gather_samples, 2) == [[Sample("a longer text", 0.5), Sample("caf?", None)]] * 2


def gather_texts(comm: Comm) -> list[str]:
    return gather_typed("ü" * 100 * comm.rank, str, comm.control)


def test_bytes_of_a_view() -> None:
    whole = torch.tensor([1.0, 2.0, 3.0])
    one = whole[1::2]
    assert one.stride() == (2,)
    as_bytes(one).zero_()
    assert whole.tolist() == [1.0, 0.0, 3.0]
    assert as_bytes(torch.ones(2, 3, dtype=torch.int16)).tolist() == [1, 0] * 6


def test_gathered_values_may_have_any_length(pool: Pool) -> None:
    assert pool.run(gather_texts, 3) == [["ü" * 100 * rank for rank in range(3)]] * 3
