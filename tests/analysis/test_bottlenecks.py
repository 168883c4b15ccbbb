"""Bottlenecks of candidates, from hand-made splits and wires."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from paceline.analysis.bottlenecks import Bottleneck, bottlenecks, rounds, threads_per_core
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.candidate_split import CandidateSplit
from paceline.analysis.traffic.wire import Traffic, Wire
from paceline.records.examination import PairLink
from paceline.records.summary import Split
from run_models import topology

LINK = PairLink(ranks=[0, 1], hosts=[0, 0], alpha_s=1e-4, beta_s_per_byte=1e-9, points=[])
PLACE = topology(threads=1, cores=2.0)


def split(**parts: float) -> CandidateSplit:
    values = {"compute_s": 0.0, "overlapped_s": 0.0, "exposed_s": 0.0, "other_s": 0.0} | parts
    data_s, descheduled_s = values.pop("data_s", 0.0), values.pop("descheduled_s", 0.0)
    mean = Split(step_s=sum(values.values()), data_s=data_s, descheduled_s=descheduled_s, **values)
    some = Estimate(0.0, None, None, 1)
    return CandidateSplit(some, some, some, some, some, None, None, mean, {0: mean})


def wire(
    operations: float,
    size: float,
    *,
    kind: str = "all_reduce",
    waits_s: float = 0.0,
    exposed_s: float = 0.8,
    ranks: int = 3,
    **wait_shares: float,
) -> Wire:
    traffic = Traffic(kind, "gradients", operations, size, 10.0, 1.0, None, None, None, None)
    waited_for = {int(rank.removeprefix("rank")): share for rank, share in wait_shares.items()}
    return Wire(ranks, [traffic], {}, [waits_s] * ranks, waited_for, exposed_s, None)


def main(*arguments: Any) -> Bottleneck:
    return bottlenecks(*arguments)[0]


def test_parts_are_sorted_and_small_parts_are_omitted() -> None:
    found = bottlenecks(split(compute_s=0.6, exposed_s=0.3, other_s=0.1), wire(1, 1e8), PLACE, LINK)
    assert [part.kind for part in found] == ["compute", "bandwidth", "other"]
    assert [part.share for part in found] == pytest.approx([0.6, 0.3, 0.1])
    assert [part.kind for part in bottlenecks(split(compute_s=0.99, exposed_s=0.01), wire(1, 1e8), PLACE, LINK)] == [
        "compute"
    ]


def test_exposed_communication_is_one_part_if_operations_cannot_be_matched() -> None:
    found = main(split(compute_s=0.4, exposed_s=0.6), None, PLACE, LINK)
    assert (found.kind, found.share) == ("exchange", pytest.approx(0.6))


def test_a_reduction_in_shared_memory_is_no_transfer() -> None:
    exposed = split(compute_s=0.1, exposed_s=0.9)
    found = main(exposed, wire(3, 1e8, kind="shared_reduce"), PLACE, LINK)
    assert found.kind == "memory"
    assert found.facts == {"bytes": 1e8}


def test_small_messages_are_latency_bound_and_large_ones_bandwidth_bound() -> None:
    exposed = split(compute_s=0.1, exposed_s=0.9)
    many = main(exposed, wire(60, 240_000), PLACE, LINK)
    assert many.kind == "latency"
    assert many.facts["latency_s"] == pytest.approx(60 * 4 * 1e-4), "2(n−1) rounds for three ranks"
    few = main(exposed, wire(2, 1e8), PLACE, LINK)
    assert few.kind == "bandwidth"
    assert few.facts["bandwidth_s"] == pytest.approx(4 / 3 * 0.1)
    assert main(exposed, wire(60, 240_000), PLACE, None).kind == "latency", "without a link the size decides"
    assert main(exposed, wire(2, 1e8), PLACE, None).kind == "bandwidth"


def test_a_link_measured_while_busy_is_ignored() -> None:
    busy = replace(LINK, alpha_s=10.0)
    found = main(split(compute_s=0.1, exposed_s=0.9), wire(2, 1e8), PLACE, busy)
    assert (found.kind, found.facts["latency_s"]) == ("bandwidth", None), "40 s of latency in 20 s of operations"


def test_the_same_messages_are_bandwidth_bound_on_a_slow_link() -> None:
    slow = replace(LINK, beta_s_per_byte=1e-6)
    assert main(split(compute_s=0.1, exposed_s=0.9), wire(60, 240_000), PLACE, slow).kind == "bandwidth"


def test_a_straggler_is_distinguished_from_mutual_waiting() -> None:
    exposed = split(compute_s=0.2, exposed_s=0.8)
    slow = main(exposed, wire(1, 1e6, waits_s=0.7, rank1=0.9, rank0=0.1), PLACE, LINK)
    assert (slow.kind, slow.facts["rank"]) == ("straggler", 1)
    assert slow.share == pytest.approx(0.7)
    assert main(exposed, wire(1, 1e6, waits_s=0.7, rank1=0.5, rank0=0.5), PLACE, LINK).kind == "uneven_ranks"


def test_of_two_ranks_the_straggler_needs_a_larger_share() -> None:
    exposed = split(compute_s=0.2, exposed_s=0.8)
    late = main(exposed, wire(1, 1e6, waits_s=0.7, ranks=2, rank1=0.95, rank0=0.05), PLACE, LINK)
    assert (late.kind, late.facts["rank"]) == ("straggler", 1)
    assert main(exposed, wire(1, 1e6, waits_s=0.7, ranks=2, rank1=0.65, rank0=0.35), PLACE, LINK).kind == "uneven_ranks"


def test_waits_of_one_run_are_scaled_by_its_exposed_communication() -> None:
    """The wire describes one run, the split all runs: a run twice as slow must not double the waiting."""
    twice = wire(1, 1e6, waits_s=1.4, exposed_s=1.6, rank1=1.0)
    assert main(split(compute_s=0.2, exposed_s=0.8), twice, PLACE, LINK).share == pytest.approx(0.7)


def test_descheduled_time_is_not_compute() -> None:
    found = bottlenecks(split(compute_s=1.0, descheduled_s=0.6), None, topology(cores=1.0), None)
    assert [(part.kind, part.share) for part in found] == [
        ("cores", pytest.approx(0.6)),
        ("compute", pytest.approx(0.4)),
    ]
    assert found[0].facts["threads_per_core"] == 2.0


def test_data_is_not_counted_twice() -> None:
    found = bottlenecks(split(compute_s=0.5, other_s=0.5, data_s=0.4), None, PLACE, None)
    assert {part.kind: part.share for part in found} == pytest.approx({"compute": 0.5, "data": 0.4, "other": 0.1})


def test_threads_per_core_covers_one_host_and_only_cpus() -> None:
    assert threads_per_core(topology(8, ranks_per_host=2, cores=2.0)) == 1.0
    assert threads_per_core(topology(threads=4, cores=2.0)) == 4.0
    assert threads_per_core(topology(device="NVIDIA H200")) is None


@pytest.mark.parametrize(
    ("kind", "expected"), [("all_reduce", 6), ("gather", 3), ("broadcast", 2), ("send", 1), ("recv", 1)]
)
def test_rounds_are_those_of_the_cost_model(kind: str, expected: int) -> None:
    assert rounds(wire(1, 1, kind=kind).traffic[0], 4) == expected
