"""Speed-up and efficiency by their definitions, both baselines, and results that are not reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments_on_disk import write_experiment, write_load
from paceline.analysis.record_set import collect_records
from paceline.analysis.scaling.curves import Scaling, ScalingPoint, scaling
from paceline.analysis.scaling.machines import oversubscription
from paceline.errors import RecordError
from paceline.records.experiment.design import Candidate
from paceline.records.experiment.record import read_experiment
from run_models import scale_design, topology
from scaling_on_disk import HALF_CORES, ONE_HOST, even, read_scaling, write_scaling, write_superlinear

APART = HALF_CORES | {"host_cpus": None, "machines": [0, 1, 2, 3], "emulated": None}
"""Hosts on separate machines."""


def steady(candidate: Candidate, repeat: int) -> float:  # noqa: ARG001
    """Return the step time of `even` without noise."""
    return even(Candidate("", candidate.strategy, point=candidate.point), 0)


def at(found: Scaling, mode: str, strategy: str, ranks: int, hosts: int | None = None) -> ScalingPoint:
    (point,) = [
        p
        for p in found.points(mode)  # type: ignore[arg-type]
        if (p.strategy, p.ranks) == (strategy, ranks) and hosts in (None, p.hosts)
    ]
    return point


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Scaling:
    """`single`, `ddp` and `gather_scatter` on 1, 2 and 4 hosts of half a core, strong and weak."""
    return read_scaling(write_scaling(tmp_path_factory.mktemp("scaling") / "e", step_s=steady, repeats=3, events=True))


def test_strong_scaling_by_its_definition(found: Scaling) -> None:
    point = at(found, "strong", "ddp", 4)
    t_1, t_4 = 0.256, 0.064 + 0.030
    assert (point.batch, point.batch_per_rank) == (256, 64)
    assert point.row.step_s is not None
    assert point.row.step_s.value == pytest.approx(t_4)
    for gain in (point.over_single, point.over_one_rank):
        assert gain is not None
        assert gain.efficiency is not None
        assert gain.speed_up.value == pytest.approx(t_1 / t_4)
        assert gain.efficiency.value == pytest.approx(t_1 / (4 * t_4))
        assert gain.efficiency.low == pytest.approx(t_1 / (4 * t_4)), "paired, and without noise"
    assert point.epoch_s is not None
    assert point.epoch_s.value == pytest.approx(5 * t_4), "1280 samples are 5 steps of 256"


def test_weak_scaling_by_its_definition(found: Scaling) -> None:
    point = at(found, "weak", "gather_scatter", 2)
    t_1, t_2 = 0.064, 0.064 + 0.040
    assert (point.batch, point.batch_per_rank) == (128, 64)
    assert point.over_one_rank is not None
    assert point.over_one_rank.efficiency is not None
    assert point.over_one_rank.efficiency.value == pytest.approx(t_1 / t_2)
    assert point.over_one_rank.speed_up.value == pytest.approx(2 * t_1 / t_2), "twice the samples"
    assert point.step_time_ratio(point.over_one_rank).value == pytest.approx(t_2 / t_1)


def test_both_modes_share_their_common_points(found: Scaling) -> None:
    assert found.modes == ["strong", "weak"]
    assert at(found, "strong", "ddp", 4).candidate is at(found, "weak", "ddp", 4).candidate
    assert at(found, "strong", "ddp", 1).candidate is not at(found, "weak", "ddp", 1).candidate
    assert at(found, "strong", "single", 1).over_single is None


def test_the_baselines_differ_if_a_strategy_has_overhead_on_one_rank(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        return steady(candidate, repeat) * (1.16 if candidate.strategy == "ddp" else 1)

    found = read_scaling(write_scaling(tmp_path / "e", step_s=step_s, modes=["strong"]))
    point = at(found, "strong", "ddp", 2)
    assert point.over_single is not None
    assert point.over_one_rank is not None
    assert point.over_one_rank.speed_up.value == pytest.approx(1.16 * point.over_single.speed_up.value)
    assert [(p.strategy, ratio.value) for p, ratio in found.single_rank_overheads("strong")] == [
        ("ddp", pytest.approx(1.16)),
        ("gather_scatter", pytest.approx(1)),
    ]


def test_intervals_are_over_pairs(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        return steady(candidate, repeat) * (1 + repeat)  # A machine that slows down for all candidates alike.

    found = read_scaling(write_scaling(tmp_path / "e", step_s=step_s, repeats=3, modes=["strong"]))
    point = at(found, "strong", "ddp", 4)
    assert point.row.step_s is not None
    assert point.row.step_s.high > 2 * point.row.step_s.value  # type: ignore[operator]
    assert point.over_single is not None
    assert point.over_single.speed_up.high == pytest.approx(point.over_single.speed_up.low)


@pytest.mark.parametrize("repeats", [1, 2])
def test_fewer_than_three_repeats_give_no_interval(tmp_path: Path, repeats: int) -> None:
    point = at(read_scaling(write_scaling(tmp_path / "e", repeats=repeats)), "strong", "ddp", 4)
    assert point.over_single is not None
    assert point.over_single.efficiency is not None
    for estimate, limit in ((point.over_single.speed_up, 2.8), (point.over_single.efficiency, 0.7)):
        assert (estimate.low, estimate.high) == (None, None)
        assert len(estimate.each) == repeats
        assert 0 < min(estimate.each) <= estimate.value <= max(estimate.each) < limit


def test_the_best_point_computes_the_same_as_one_process(tmp_path: Path) -> None:
    path = write_scaling(tmp_path / "e", ("single", "ddp", "gather_scatter"))
    before = read_scaling(path).best("strong")
    assert before is not None
    assert before.strategy == "ddp"
    for file in path.rglob("run.json"):
        content = json.loads(file.read_text())
        content["topology"]["lockstep"] = content["topology"]["strategy"] != "ddp"
        file.write_text(json.dumps(content))
    after = read_scaling(path).best("strong")
    assert after is not None
    assert after.strategy == "gather_scatter"


def test_no_speed_up_is_reported_for_ranks_that_share_cores(tmp_path: Path) -> None:
    shapes = [(1, 1), (1, 2), (1, 4)]
    path = write_scaling(tmp_path / "e", shapes=shapes, design=ONE_HOST, cores=2.0, step_s=steady)
    found = read_scaling(path)
    oversubscribed, fits = at(found, "strong", "ddp", 4), at(found, "strong", "ddp", 2)
    assert oversubscribed.oversubscribed == "4 ranks share 2 cores"
    assert oversubscribed.row.step_s is not None, "its time is reported"
    assert (oversubscribed.over_single, oversubscribed.over_one_rank) == (None, None)
    assert fits.over_single is not None
    best = found.best("strong")
    assert best is not None
    assert best.ranks == 2
    assert any(
        "4 ranks share 2 cores, so no speed-up or efficiency is reported" in warning for warning in found.warnings
    )
    peak = found.peak(next(c for c in found.curves if c.strategy == "ddp"))
    assert peak is not None
    assert (peak.best.ranks, peak.beyond) == (2, None)


@pytest.mark.parametrize(
    ("design", "shapes", "oversubscribed"),
    [
        (HALF_CORES, [(1, 1), (4, 1)], ""),
        (HALF_CORES | {"host_cpus": 1.0}, [(1, 1), (4, 1)], "4 hosts with 1 core each share 2 cores"),
        (HALF_CORES | {"host_cpus": None}, [(1, 1), (4, 1)], "4 ranks share 2 cores"),
        (APART, [(1, 1), (4, 1)], ""),
        (APART, [(1, 1), (2, 4)], "4 ranks share 2 cores"),
        (APART | {"ranks_pinned": True}, [(1, 1), (2, 4)], ""),
        (APART | {"machines": [0, 0, 0]}, [(1, 1), (3, 1)], "3 ranks share 2 cores"),
        (APART | {"machines": [0, 0, 1, 1]}, [(1, 1), (4, 1)], ""),
        (APART | {"machines": [0, 0, 0, 1]}, [(1, 1), (4, 1)], "3 ranks share 2 cores"),
    ],
)
def test_oversubscribed_cores(
    tmp_path: Path, design: dict[str, float], shapes: list[tuple[int, int]], oversubscribed: str
) -> None:
    cores = design["host_cpus"] or 2.0
    found = read_scaling(write_scaling(tmp_path / "e", shapes=shapes, design=design, cores=cores, repeats=1))
    assert found.points("strong")[-1].oversubscribed == oversubscribed


@pytest.mark.parametrize(
    ("workers", "gpus", "oversubscribed"), [(2, 2, ""), (4, 2, "4 ranks share 2 GPUs"), (2, 1, "2 ranks share 1 GPU")]
)
def test_oversubscribed_gpus(workers: int, gpus: int, oversubscribed: str) -> None:
    on_gpus = topology(workers, device="H200", threads=8, cores=8.0)
    assert oversubscription(on_gpus, scale_design(gpus=gpus)) == oversubscribed


def test_efficiency_needs_the_cores_of_the_baseline(tmp_path: Path) -> None:
    threads = {"single": 2}
    path = write_scaling(tmp_path / "e", shapes=[(1, 1), (1, 2)], design=ONE_HOST, cores=2.0, threads=threads)
    found = read_scaling(path)
    point = at(found, "strong", "ddp", 2)
    assert point.over_single is not None
    assert point.over_single.efficiency is None
    assert point.over_single.no_efficiency_reason == "single had 2 cores, each of several ranks has 1 core"
    assert point.over_one_rank is not None
    assert point.over_one_rank.efficiency is not None
    assert found.single_rank_overheads("strong") == []


def test_the_same_ranks_on_fewer_hosts(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        assert candidate.point is not None
        return steady(candidate, repeat) * (1 + 0.3 * (candidate.point.ranks_per_host - 1))

    shapes = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
    found = read_scaling(write_scaling(tmp_path / "e", shapes=shapes, step_s=step_s, modes=["strong"]))
    ratios = {(s.fewer.strategy, s.fewer.ranks): s.ratio.value for s in found.host_count_comparisons("strong")}
    assert ratios == {(name, ranks): pytest.approx(1.3) for name in ("ddp", "gather_scatter") for ranks in (2, 4)}
    curves = [(c.strategy, c.ranks_per_host, [p.ranks for p in c.points]) for c in found.in_mode("strong")]
    assert ("ddp", 1, [1, 2, 4]) in curves
    assert ("ddp", 2, [2, 4]) in curves
    point = at(found, "strong", "ddp", 4, hosts=2)
    assert point.over_single is not None
    assert point.over_single.efficiency is None, "two ranks share the cores that the baseline had"


def test_the_number_of_ranks_at_which_a_strategy_is_fastest(found: Scaling) -> None:
    peaks = {curve.strategy: found.peak(curve) for curve in found.candidates("strong")}
    assert peaks["ddp"] is not None
    assert (peaks["ddp"].best.ranks, peaks["ddp"].beyond) == (4, None)
    assert peaks["ddp"].before is not None
    assert peaks["ddp"].before.value == pytest.approx((0.128 + 0.010) / (0.064 + 0.030))
    assert peaks["gather_scatter"] is not None
    assert (peaks["gather_scatter"].best.ranks, peaks["gather_scatter"].beyond_ranks) == (2, 4)
    assert peaks["gather_scatter"].beyond is not None
    assert peaks["gather_scatter"].beyond.value == pytest.approx((0.064 + 0.120) / (0.128 + 0.040))


def test_every_point_has_a_time_split(found: Scaling) -> None:
    for point in found.points("strong"):
        assert point.row.split is not None
        mean = point.row.split.mean
        parts = (mean.compute_s, mean.overlapped_s, mean.exposed_s, mean.other_s)
        assert sum(parts) == pytest.approx(mean.step_s)
        assert (mean.exposed_s > 0) == (point.ranks > 1 and point.strategy != "single")


def test_a_failed_point_does_not_affect_the_others(tmp_path: Path) -> None:
    name = "ddp on 4 of 4, batch 256"
    found = read_scaling(write_scaling(tmp_path / "e", failures={name: "it broke"}, modes=["strong"]))
    failed = at(found, "strong", "ddp", 4)
    assert (failed.row.failure, failed.over_single, failed.is_comparable) == ("it broke", None, False)
    assert next(curve for curve in found.curves if curve.strategy == "ddp").last.ranks == 2
    assert at(found, "strong", "gather_scatter", 4).over_single is not None


def test_without_the_baseline_strategies_are_compared_with_their_one_rank_run(tmp_path: Path) -> None:
    failures = {"single on 1 of 1, batch 256": "no"}
    found = read_scaling(write_scaling(tmp_path / "e", failures=failures, modes=["strong"]))
    point = at(found, "strong", "ddp", 4)
    assert point.over_single is None
    assert point.over_one_rank is not None


def test_an_efficiency_above_one_is_reported(tmp_path: Path) -> None:
    def step_s(candidate: Candidate, repeat: int) -> float:
        assert candidate.point is not None
        return steady(candidate, repeat) * (3 if candidate.point.ranks == 1 else 1)

    found = read_scaling(write_scaling(tmp_path / "e", step_s=step_s, modes=["strong"]))
    (warning,) = [warning for warning in found.warnings if warning.startswith("Efficiency above 100%")]
    assert "ddp on 4 of 4, batch 256" in warning


def test_a_speed_up_beside_other_programs_that_ranks_cannot_have_is_no_result(tmp_path: Path) -> None:
    path = write_superlinear(tmp_path / "e")
    single, two = "single on 1 of 1, batch 256", "ddp on 2 of 1, batch 256"
    quiet = read_scaling(path)
    assert not quiet.in_doubt
    found = read_scaling(write_load(path, 1.3))
    assert (two, single) in found.in_doubt
    (note,) = [note for note in found.warnings if "is more than 2 ranks can gain" in note]
    assert note.startswith(f"{two} (")
    assert "its 2 threads wait for each other" in note
    assert any("the speed-up is valid" in note for note in quiet.warnings)
    assert not any("the speed-up is valid" in note for note in found.warnings)
    assert not [note for note in found.warnings if "Efficiency above 100%" in note and two in note]


def test_ranks_that_cannot_be_placed_evenly_are_reported(tmp_path: Path) -> None:
    path = write_scaling(tmp_path / "e", shapes=[(1, 1), (1, 5), (3, 2)], design=HALF_CORES, repeats=1)
    (five, six) = [note for note in read_scaling(path).warnings if "evenly" in note]
    assert five == (
        "5 ranks cannot be placed evenly on 4 hosts, so they are placed on 1 host. "
        "Choose a placement with --ranks-per-host."
    )
    assert six == (
        "6 ranks cannot be placed evenly on 4 hosts, so they are placed on 3 hosts. "
        "Choose a placement with --ranks-per-host."
    )
    requested = HALF_CORES | {"requested_ranks_per_host": [5, 2]}
    path = write_scaling(tmp_path / "requested", shapes=[(1, 1), (1, 5), (3, 2)], design=requested, repeats=1)
    assert not [note for note in read_scaling(path).warnings if "evenly" in note]


def test_the_hosts_that_are_used_are_reported_if_hosts_differ(tmp_path: Path) -> None:
    design = HALF_CORES | {"emulated": "2@1gbit,2@100mbit"}
    shapes = [(1, 1), (2, 1), (3, 1), (4, 1)]
    path = write_scaling(tmp_path / "e", shapes=shapes, modes=["strong"], design=design, repeats=1)
    assert [note for note in read_scaling(path).warnings if "emulated hosts differ" in note] == [
        "The emulated hosts differ, and runs on fewer hosts use the first of them: "
        "1 host is host 0 (at 1 Gbit/s each way); "
        "2 hosts are hosts 0 to 1 (at 1 Gbit/s each way); "
        "3 hosts are hosts 0 to 2 (2 at 1 Gbit/s each way, 1 at 100 Mbit/s each way). "
        "Compare points on different numbers of hosts with care."
    ]


def test_an_experiment_without_runs(tmp_path: Path) -> None:
    found = read_scaling(write_scaling(tmp_path / "e", repeats=0, interrupted=True))
    assert found.comparison.interrupted
    assert found.best("strong") is None
    assert all(found.peak(curve) is None for curve in found.curves)


def test_a_comparison_is_no_scaling_experiment(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not one scaling experiment"):
        scaling(collect_records([read_experiment(write_experiment(tmp_path / "e"))]))


def test_a_speed_up_that_contradicts_the_median_times_has_a_note(tmp_path: Path) -> None:
    times = {"single": (4.09, 3.5, 7.0), "ddp": (4.00, 4.06, 8.0)}  # Medians 4.09 and 4.06; by repeat ddp is slower.
    path = write_scaling(
        *(tmp_path / "e", ("single", "ddp"), ((1, 1), (2, 1)), ("strong",)),
        repeats=3,
        step_s=lambda candidate, repeat: times[candidate.strategy][repeat],
    )
    (note,) = [note for note in read_scaling(path).warnings if "contradict each other" in note]
    assert note.startswith("ddp on ")
    assert "the ratio to single on 1" in note
