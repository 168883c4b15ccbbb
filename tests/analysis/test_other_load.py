"""Load of other programs, from simulated records in which it and its effect are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from experiments_on_disk import write_run
from paceline.analysis.caveats import caveats
from paceline.analysis.other_load import LoadedRun, explained_share, load_of_run, other_load
from paceline.analysis.record_set import RecordedRun, RecordSet
from paceline.config import RunConfig
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.description import RecordedEmulation
from paceline.records.experiment.design import Candidate
from paceline.records.schema import ResourceRow
from paceline.records.writer import ResourceWriter
from run_models import PROVENANCE

DDP, P2P = Candidate("ddp", "ddp"), Candidate("p2p", "p2p")
BASE_S = {"ddp": 0.02, "p2p": 0.04}
RANK_SHARE = 0.3
"""CPU time ÷ wall time of each rank."""
SAMPLED_S = 2.0


def recorded(path: Path, candidate: Candidate, load: float, step_s: float) -> RunRecord:
    """Write and read a run on 2 of 2 cores beside a load of other programs, in cores."""
    config = RunConfig(strategy=candidate.strategy, steps=12)
    write_run(path, candidate, config, 2, [2.0] * 12, step_s, None, replace(PROVENANCE, cpu_count=2))
    for rank in range(2):
        writer = ResourceWriter(RunFolder(path), rank)
        for sample in range(5):
            time_s = sample * SAMPLED_S / 4
            busy = (load + 2 * RANK_SHARE) / 2 if rank == 0 and sample else None
            writer.write([ResourceRow(time_s, RANK_SHARE * time_s, 10**8, 4, 0.0, None, None, busy, None, None)])
        writer.close()
    return read_run(path)


def experiment(path: Path, loads: Sequence[float], effect: Callable[[float], float]) -> RecordSet:
    """Return runs of two candidates in repeats with these loads; `effect` is the factor of the step time at a load."""
    runs = []
    for repeat, load in enumerate(loads):
        for candidate in (DDP, P2P):
            step_s = BASE_S[candidate.name] * effect(load)
            run = recorded(path / f"{repeat}-{candidate.name}", candidate, load, step_s)
            runs.append(RecordedRun(candidate.name, (0, repeat), (0, repeat), run))
    return RecordSet(candidates=[DDP, P2P], runs=runs, reference="ddp")


def notes(record_set: RecordSet) -> list[str]:
    return [note for note in caveats(record_set, {}) if "Other programs" in note]


LOADS = [0.4, 0.9, 1.3, 0.6]


def test_the_load_is_what_the_ranks_did_not_use(tmp_path: Path) -> None:
    for load in (0.0, 0.4, 1.3):
        run = recorded(tmp_path / str(load), DDP, load, 0.02)
        assert load_of_run(run) == pytest.approx(load, abs=1e-3)


def test_emulated_hosts_share_one_machine(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", DDP, 0.5, 0.02)
    emulated = RecordedEmulation(spec="2@200mbit", host_cpus=0.5)
    object.__setattr__(run, "topology", replace(run.topology, ranks_per_host=1, cores=0.5, emulated=emulated))
    assert load_of_run(run) == pytest.approx(0.5, abs=1e-3), "the ranks of both hosts, on two cores"


def test_a_load_that_step_times_follow_explains_their_spread(tmp_path: Path) -> None:
    record_set = experiment(tmp_path, LOADS, lambda load: math.exp(0.5 * load))
    found = other_load(record_set)
    assert found is not None
    assert (found.least, found.most) == pytest.approx((0.4, 1.3), abs=1e-3)
    assert found.explained == pytest.approx(1.0, abs=0.01)
    assert notes(record_set) == [
        "Other programs used 0.4–1.3 of 2 cores during the runs; between repeats, step times follow that load: it may "
        "explain about 100% of their spread. Repeat on a quiet machine for a narrower interval."
    ]


def test_a_load_without_effect_explains_nothing(tmp_path: Path) -> None:
    record_set = experiment(tmp_path, LOADS, lambda load: 1 + 0.01 * (round(10 * load) % 3))
    assert notes(record_set) == [
        "Other programs used 0.4–1.3 of 2 cores during the runs, but step times do not measurably follow that load "
        "from repeat to repeat."
    ]


def test_of_few_runs_only_the_load_is_stated(tmp_path: Path) -> None:
    (note,) = notes(experiment(tmp_path, LOADS[:2], lambda load: 1 + load))
    assert note.startswith("Other programs used 0.4–0.9 of 2 cores during the runs, which makes times longer")
    assert "too few runs to say by how much" in note


def test_a_quiet_machine_has_no_note(tmp_path: Path) -> None:
    assert notes(experiment(tmp_path, [0.0, 0.05, 0.09], lambda load: 1 + load)) == []


def test_runs_without_samples_of_the_host_have_no_load(tmp_path: Path) -> None:
    write_run(tmp_path / "run", DDP, RunConfig(steps=12), 2, [2.0] * 12, 0.02, None, PROVENANCE)
    run = read_run(tmp_path / "run")
    assert load_of_run(run) is None
    assert other_load(RecordSet([DDP], [RecordedRun("ddp", (0, 0), (0, 0), run)], "ddp")) is None


def simulated(seed: int, slope: float, noise: float) -> float:
    """Return the explained share of three candidates in ten repeats, whose loads are uniform from 0 to 1."""
    chance = random.Random(seed)
    runs = []
    for candidate in range(3):
        for load in (chance.random() for _ in range(10)):
            runs.append(LoadedRun(str(candidate), load, candidate + slope * load + chance.gauss(0, noise)))
    found = explained_share(runs)
    assert found is not None
    return found


def test_the_explained_share_is_that_of_the_simulation() -> None:
    load_variance = 1 / 12
    noise = math.sqrt(load_variance * 0.4 / 0.6)
    shares = [simulated(seed, slope=1.0, noise=noise) for seed in range(200)]
    assert sum(shares) / len(shares) == pytest.approx(0.6, abs=0.03)


def test_a_load_without_effect_is_rarely_blamed() -> None:
    assert sum(simulated(seed, slope=0.0, noise=0.1) > 0 for seed in range(400)) <= 0.08 * 400
