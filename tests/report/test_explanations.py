"""Tests of the sentences on what limits a candidate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import read_comparison, write_experiment
from paceline.analysis.bottlenecks import Bottleneck, BottleneckKind
from paceline.records.experiment.design import Candidate
from paceline.report.explanations import PART, SENTENCES, ExplainedCandidate, explain
from run_models import topology

CORES = {"threads_per_core": 2.0, "ranks": 4, "threads": 1, "cores": 2.0}
TRANSFER: dict[str, Any] = {
    "operations": 34.0,
    "bytes_each": 1e6,
    "bytes": 34e6,
    "latency_s": 0.002,
    "bandwidth_s": 0.01,
}
TRANSFER |= {"waits_known": True, "within_host": False}
FACTS: dict[BottleneckKind, dict[str, Any]] = {
    "compute": {"overlapped_s": 0.02},
    "cores": CORES,
    "data": {},
    "straggler": {"rank": 2, "wait_share": 0.9},
    "uneven_ranks": {"rank": 2, "wait_share": 0.4},
    "latency": TRANSFER,
    "bandwidth": TRANSFER,
    "memory": {"bytes": 215_000},
    "exchange": {},
    "other": {},
}


def case(
    tmp_path: Path, strategy: str = "allreduce", central_rank: int | None = None, **changes: Any
) -> ExplainedCandidate:
    candidate = Candidate(strategy, strategy)
    write_experiment(tmp_path, [candidate], repeats=1)
    config = {"precision": "fp32", "channels_last": False}
    own = topology(**({"sends": "overlapped" if strategy == "ddp" else "singly"} | changes))
    return ExplainedCandidate(read_comparison(tmp_path).rows[0], own, config, None, central_rank)


def words(kind: BottleneckKind, about: ExplainedCandidate, share: float = 0.4, **facts: Any) -> tuple[str, str]:
    return SENTENCES[kind](Bottleneck(kind, share, 0.02, FACTS[kind] | facts), about)


@pytest.mark.parametrize("kind", list(SENTENCES))
def test_every_limit_has_its_share_its_time_and_a_remedy(kind: BottleneckKind, tmp_path: Path) -> None:
    text, remedy = words(kind, case(tmp_path))
    assert text.startswith("40% of the step (20.00 ms)")
    assert text.endswith(".")
    assert remedy.endswith(".")
    assert kind in PART


def test_too_many_ranks_are_distinguished_from_busy_cores(tmp_path: Path) -> None:
    text, remedy = words("cores", case(tmp_path))
    assert "4 ranks × 1 thread are too many for 2 cores" in text
    assert "--ranks 2" in remedy
    text, _ = words("cores", case(tmp_path / "b"), threads_per_core=1.0)
    assert "too many" not in text
    alone = case(tmp_path / "c")
    baseline = replace(alone, row=replace(alone.row, candidate=Candidate("single", "single", role="baseline")))
    assert "communication" not in words("cores", baseline, threads_per_core=1.0)[1]
    assert (
        "(20.00 ms) is lost because the compute thread was descheduled: communication threads or other programs" in text
    )


def test_a_fraction_of_a_core_is_reported(tmp_path: Path) -> None:
    text, remedy = words("cores", case(tmp_path), ranks=1, cores=0.5)
    assert "its host has 0.5 cores" in text
    assert "--ranks" not in remedy


def test_more_servers_are_suggested_for_a_parameter_server(tmp_path: Path) -> None:
    assert "servers=2" in words("exchange", case(tmp_path / "a", "parameter_server:asynchronous=true"))[1]
    text, remedy = words("exchange", case(tmp_path / "b"))
    assert text.endswith("is exposed communication: transfers, and waiting for a server.")
    assert "servers" not in remedy


def test_transfers_are_compared_with_the_idle_link(tmp_path: Path) -> None:
    about = case(tmp_path)
    assert "idle link needs 2.00 ms for latency and 10.00 ms for the bytes" in words("bandwidth", about)[0]
    assert "busy" not in words("bandwidth", about)[0]
    text = words("bandwidth", about, latency_s=0.001, bandwidth_s=0.001)[0]
    assert text.endswith(
        "The idle link needs only 1.00 ms for latency and 1.00 ms for the bytes; probably the cores are busy."
    )
    assert "idle" not in words("bandwidth", about, latency_s=None, bandwidth_s=None)[0]


def test_a_faster_link_is_suggested_only_where_the_link_is_the_bottleneck(tmp_path: Path) -> None:
    about = case(tmp_path, "ddp", sends="overlapped")
    assert "a faster link" in words("bandwidth", about)[1]
    assert "a faster link" not in words("bandwidth", about, within_host=True)[1]
    busy_cores = words("bandwidth", about, latency_s=0.001, bandwidth_s=0.001)[1]
    assert "a faster link" not in busy_cores
    assert "free cores for the communication threads" in busy_cores


@pytest.mark.parametrize("sends", ["singly", "packed", "overlapped", "overlapped_forward"])
def test_many_small_operations_that_exceed_the_link_time_are_not_blamed_on_latency(sends: str, tmp_path: Path) -> None:
    text, remedy = words("latency", case(tmp_path, "ring", sends=sends), latency_s=0.002, bandwidth_s=0.001)
    assert "(20.00 ms) is exposed transfer: " in text
    assert "on average. The idle link needs only 2.00 ms for latency and 1.00 ms for the bytes; probably" in text
    assert "limited by latency" not in text
    assert remedy == "free cores for the communication threads: fewer --ranks or --threads on a host."


def test_transfers_may_include_waiting_where_that_is_unknown(tmp_path: Path) -> None:
    assert "or waiting for other ranks" in words("bandwidth", case(tmp_path), waits_known=False)[0]


def test_what_helps_depends_on_the_strategy(tmp_path: Path) -> None:
    plain, buckets = case(tmp_path / "a"), case(tmp_path / "b", "ddp", sends="overlapped")
    through_0 = case(tmp_path / "c", "gather_scatter", central_rank=0)
    assert "overlapping it with the backward pass (ddp)" in words("bandwidth", plain)[1]
    assert "ddp" not in words("bandwidth", buckets)[1]
    assert "spreading the traffic over all links (allreduce)" in words("bandwidth", through_0)[1]
    assert "ddp packs gradients" in words("latency", plain)[1]
    assert "larger buckets" in words("latency", buckets)[1]


@pytest.mark.parametrize(
    ("sends", "latency", "bandwidth"),
    [
        ("singly", "ddp packs gradients into buckets", "overlapping it with the backward pass (ddp)"),
        ("packed", "fewer ranks", "overlapping it with the backward pass (ddp)"),
        ("overlapped", "larger buckets", "overlapping it with the forward pass too (priority)"),
        ("overlapped_forward", "larger buckets", "a faster link"),
    ],
)
def test_what_helps_depends_on_how_gradients_travel(sends: str, latency: str, bandwidth: str, tmp_path: Path) -> None:
    about = replace(case(tmp_path, "ring"), topology=topology(sends=sends))
    assert latency in words("latency", about)[1]
    assert bandwidth in words("bandwidth", about)[1]
    assert ("ddp" in words("latency", about)[1]) == (sends == "singly")
    assert ("ddp" in words("bandwidth", about)[1]) == (sends in ("singly", "packed"))
    assert ("priority" in words("bandwidth", about)[1]) == (sends == "overlapped")


def test_ranks_of_one_host_may_share_memory(tmp_path: Path) -> None:
    about = case(tmp_path, "ddp", sends="overlapped")
    for kind in ("latency", "bandwidth"):
        assert "(shared_memory)" in words(kind, about, within_host=True)[1]  # type: ignore[arg-type]
        assert "(shared_memory)" not in words(kind, about)[1]  # type: ignore[arg-type]
    text, remedy = words("memory", about)
    assert "summing 215.00 kB of gradients in shared memory" in text
    assert "link" not in text + remedy


def test_a_rank_slowed_on_purpose_is_reported_as_such(tmp_path: Path) -> None:
    slowed = replace(case(tmp_path), config={"slow_rank": "2:3"})
    text, remedy = words("straggler", slowed)
    assert "rank 2, which was slowed down 3× on purpose (--slow-rank)" in text
    assert "ranks do not wait for each other (parameter_server:asynchronous=true)" in remedy
    assert "find out" in words("straggler", slowed, rank=1)[1]


def test_waiting_for_a_central_rank_is_caused_by_the_strategy(tmp_path: Path) -> None:
    through_0 = case(tmp_path / "a", "gather_scatter", central_rank=0)
    text, remedy = words("straggler", through_0, rank=0)
    assert "rank 0, through which all gradients pass" in text
    assert "allreduce" in remedy
    text, remedy = words("straggler", case(tmp_path / "b"), rank=0)
    assert "90% of it for rank 0." in text
    assert "what takes longer on rank 0" in remedy


@pytest.mark.parametrize(
    ("workers", "rank", "said"),
    [
        (
            3,
            0,
            "3 ranks are not a power of two, so the last rank sends its gradients to a partner, which then "
            "has twice the work; rank 0 is that partner.",
        ),
        (
            6,
            1,
            "6 ranks are not a power of two, so the last 2 ranks send theirs to partners, which then "
            "have twice the work; rank 1 is one of them.",
        ),
        (6, 2, ""),
        (4, 0, ""),
    ],
)
def test_ranks_beyond_a_power_of_two_give_their_partners_twice_the_work(
    workers: int, rank: int, said: str, tmp_path: Path
) -> None:
    """With three ranks all transfers involve rank 0, which is still not a central rank."""
    about = case(tmp_path, "my_module:Mine", central_rank=0 if workers == 3 else None, workers=workers)
    about = replace(about, algorithms=["halving_doubling"])
    text, remedy = words("straggler", about, rank=rank)
    assert said in text
    assert "through which" not in text
    assert ("power of two" in remedy) == bool(said)
    folds = workers != 4
    assert (
        ("power of two" in words("bandwidth", about)[0]) == folds == ("a power of two" in words("bandwidth", about)[1])
    )
    assert "spreading" not in words("bandwidth", about)[1]
    assert "power of two" not in words("bandwidth", replace(about, algorithms=["ring"]))[0]


def test_the_central_rank_follows_from_the_plan(tmp_path: Path) -> None:
    """A rank that moves more than the others, but not everything, is not a central rank."""
    write_experiment(tmp_path, [Candidate("allreduce", "allreduce")], repeats=1, ranks=4, events=True)
    (file,) = tmp_path.rglob("repeat-*/1/summary.json")
    summary = json.loads(file.read_text())
    for rank in summary["ranks"]:
        parts = {"compute_s": 0.1, "overlapped_s": 0.0, "exposed_s": 0.9, "other_s": 0.0, "data_s": 0.0}
        rank["split"] = parts | {"step_s": 1.0, "descheduled_s": 0.0}

    def waiting(moved: list[int]) -> str:
        summary["traffic"] |= {"sent_bytes": moved, "received_bytes": moved}
        file.write_text(json.dumps(summary))
        return next(reason.text for reason in explain(read_comparison(tmp_path)) if reason.kind == "straggler")

    assert "for rank 3, through which all gradients pass." in waiting([100, 100, 100, 300])
    assert waiting([100, 100, 200, 200]).endswith("for rank 3.")


def test_the_algorithm_is_that_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SENTENCES, "latency", lambda _, about: (f"{about.folded} folded", ""))
    write_experiment(tmp_path, [Candidate("allreduce", "allreduce")], repeats=1, ranks=3, events=True)
    (file,) = tmp_path.rglob("repeat-*/1/summary.json")
    summary = json.loads(file.read_text())

    def explained(algorithm: str) -> list[str]:
        file.write_text(json.dumps(summary | {"traffic": summary["traffic"] | {"algorithms": [algorithm]}}))
        return [reason.text for reason in explain(read_comparison(tmp_path)) if reason.kind == "latency"]

    assert explained("halving_doubling") == ["1 folded"]
    assert explained("ring") == ["0 folded"]


def test_shares_are_of_a_ranks_own_step_where_ranks_do_not_step_together(tmp_path: Path) -> None:
    text, _ = words("exchange", case(tmp_path, "parameter_server:asynchronous=true", lockstep=False))
    assert text.startswith("40% of a rank's own step (20.00 ms)")


def test_what_helps_computing_is_listed_once(tmp_path: Path) -> None:
    write_experiment(
        tmp_path,
        [Candidate("ddp", "ddp"), Candidate("none", "none", role="bound")],
        events=True,
    )
    computing = [reason for reason in explain(read_comparison(tmp_path)) if reason.kind == "compute"]
    assert len(computing) == 2
    assert [bool(reason.remedy) for reason in computing] == [True, False]
