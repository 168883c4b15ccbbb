"""Tests of the proof for scripts: the user's optimiser is kept, its step captures gradients, the mean is exact."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ExponentialLR

from paceline.comm import Comm
from paceline.config import RunConfig, Script
from paceline.errors import WorkloadError
from paceline.records import RunFolder
from paceline.strategies.base.strategy import AfterBackward
from paceline.strategies.registry import create
from paceline.training.scripts.script_parity import OracleCheckTask, OracleTask, ParityTask
from paceline.training.scripts.script_task import ScriptFinished, ScriptTask
from ranks import Pool, RankFailed
from registered import LOSSLESS


def probe(
    comm: Comm,
    folder: str,
    kind: type[ScriptTask],
    strategy: str,
    dtype: torch.dtype,
    offset: float,
    max_norm: float | None = 100.0,
    change: Callable[[nn.Module], None] = lambda _: None,
) -> Tensor:
    """Run three steps with gradients that depend on the rank, under a schedule; return the weights."""
    torch.manual_seed(0)
    config = RunConfig(strategy=strategy, steps=40)
    task = kind(
        script=Script(path="train.py"), config=config, folder=RunFolder(Path(folder)), oracle=f"{folder}/gradients.pt"
    )
    model = nn.Linear(3, 2).to(dtype)
    with task.attach(
        model, lambda p: torch.optim.SGD([w for _, w in p], lr=1.0), task.make_strategy(), comm, "broadcast"
    ) as sync:
        schedule = ExponentialLR(sync.optimizer, 0.5)
        try:
            for step in range(10):
                x = torch.full((4, 3), comm.rank + step + offset, dtype=dtype)
                sync.model(x).square().mean().backward()
                change(model)
                sync.step(max_norm=max_norm)
                schedule.step()
        except ScriptFinished:
            assert schedule.get_last_lr() == [0.25], "two steps before the last"
    assert sync.finished
    return model.weight.detach().clone()


def proven(
    pool: Pool, folder: Path, kind: type[ScriptTask], strategy: str = "ddp", offset: float = 1.0
) -> dict[str, float]:
    pool.run(probe, 2, str(folder), kind, strategy, torch.float64, offset)
    found: dict[str, float] = json.loads((folder / "parity.json").read_text())
    return found


def test_strategies_against_the_oracle(pool: Pool, tmp_path: Path) -> None:
    weights = pool.run(probe, 2, str(tmp_path), OracleTask, "ddp", torch.float64, 1.0)
    torch.manual_seed(0)
    fresh = nn.Linear(3, 2).to(torch.float64).weight
    assert all(torch.equal(weight, fresh) for weight in weights), "a probe changes nothing"
    for strategy in ("ddp", "allreduce", "gather_scatter"):
        assert proven(pool, tmp_path, ParityTask, strategy)["error"] < 1e-14
    assert proven(pool, tmp_path, ParityTask, "none")["error"] > 0.1
    assert proven(pool, tmp_path, OracleCheckTask)["error"] == 0
    assert proven(pool, tmp_path, OracleCheckTask, offset=1.5)["error"] > 0.1


def test_the_tolerance_is_that_of_the_gradients(pool: Pool, tmp_path: Path) -> None:
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for kind in (OracleTask, ParityTask):
            pool.run(probe, 2, str(tmp_path), kind, "allreduce", dtype, 1.0)
        parity = json.loads((tmp_path / "parity.json").read_text())
        assert parity["error"] < parity["tolerance"]
        found.append(parity["tolerance"])
    assert found == [1e-10, 1e-5, 2e-2]


def probe_scaled(comm: Comm, folder: str, kind: type[ScriptTask], strategy: str, overflows: int) -> int:
    """Run a script with a scaler, whose first steps overflow on one rank; return how many steps it made."""
    torch.manual_seed(0)
    config = RunConfig(strategy=strategy, steps=40)
    task = kind(
        script=Script(path="train.py"), config=config, folder=RunFolder(Path(folder)), oracle=f"{folder}/gradients.pt"
    )
    scaler, made = GradScaler("cpu"), 0
    with task.attach(
        nn.Linear(3, 2), lambda p: torch.optim.SGD(p, lr=1.0), task.make_strategy(), comm, "broadcast"
    ) as sync:
        with suppress(ScriptFinished):
            for step in range(40):
                loss = sync.model(torch.full((4, 3), comm.rank + step + 1.0)).square().mean()
                made += 1
                scaler.scale(loss * math.inf if step < overflows and comm.rank == 1 else loss).backward()
                sync.step(max_norm=0.1, scaler=scaler)
        assert sync.finished
    return made


def test_skipped_steps_have_no_gradient_to_compare(pool: Pool, tmp_path: Path) -> None:
    """Gradients are compared unscaled, over as many steps as without overflows."""
    for kind, strategy in ((OracleTask, "ddp"), (ParityTask, "ddp"), (ParityTask, "priority"), (ParityTask, "tree")):
        assert pool.run(probe_scaled, 2, str(tmp_path), kind, strategy, 2) == [5, 5]
    assert json.loads((tmp_path / "parity.json").read_text())["error"] < 1e-6
    first, _, last = torch.load(tmp_path / "gradients.pt")["gradients"]
    assert 0.1 < first["weight"].norm() < 1000
    assert last["weight"].norm() < 0.1001


def test_a_script_whose_gradients_are_never_finite_is_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="the scaled gradients of 32 steps were not finite"):
        pool.run(probe_scaled, 2, str(tmp_path), OracleTask, "ddp", 40)


class Sum(AfterBackward):
    """Strategy that forgets to divide; clipping would hide it."""

    name: ClassVar[str] = "sum"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)


class Broken(Sum):
    """Strategy that returns NaN on one rank."""

    def agree(self, gradients: Sequence[Tensor]) -> None:
        super().agree(gradients)
        for gradient in gradients:
            gradient /= self.comm.world_size if self.comm.rank == 0 else math.nan


def test_neither_clipping_nor_a_nan_hides_a_mistake(pool: Pool, tmp_path: Path) -> None:
    pool.run(probe, 2, str(tmp_path), OracleTask, "ddp", torch.float64, 1.0, 1e-3)
    for strategy, error in (("ddp", 0.0), (f"{__name__}:Sum", 1.0), (f"{__name__}:Broken", None)):
        pool.run(probe, 2, str(tmp_path), ParityTask, strategy, torch.float64, 1.0, 1e-3)
        found = json.loads((tmp_path / "parity.json").read_text())
        assert found["error"] == (error if error is None else pytest.approx(error, abs=1e-12))
    first, _, last = torch.load(tmp_path / "gradients.pt")["gradients"]
    assert first["weight"].norm() > 1e-3 > last["weight"].norm(), "one step is clipped"


def steps_the_optimiser(comm: Comm, folder: str) -> str:
    task = OracleTask(script=Script(path="train.py"), config=RunConfig(steps=40), folder=RunFolder(Path(folder)))
    sync = task.attach(nn.Linear(3, 2), torch.optim.SGD, task.make_strategy(), comm, "broadcast")
    sync.model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(WorkloadError) as found:
        sync.optimizer.step()
    sync.close()
    return found.value.message


def test_a_step_of_the_optimiser_alone_is_refused_in_the_proof_too(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(steps_the_optimiser, 1, str(tmp_path)) == ["the optimiser was stepped without sync.step()."]


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def of_changed(pool: Pool, folder: Path, strategy: str, change: Callable[[nn.Module], None]) -> dict[str, Any]:
    """Return the proof of a script that changes gradients between backward and `sync.step`."""
    pool.run(probe, 2, str(folder), ParityTask, strategy, torch.float64, 1.0, None, change)
    found: dict[str, Any] = json.loads((folder / "parity.json").read_text())
    return found


def test_a_script_that_clips_by_itself(pool: Pool, tmp_path: Path) -> None:
    pool.run(probe, 2, str(tmp_path), OracleTask, "ddp", torch.float64, 1.0, None, clip)
    for name in LOSSLESS:
        if name == "priority":
            with pytest.raises(RankFailed, match="was changed after backward had sent it"):
                of_changed(pool, tmp_path, name, clip)
            continue
        found = of_changed(pool, tmp_path, name, clip)
        assert found["error"] < 1e-14, "no strategy is blamed"
        caveat = found.get("caveat", "")
        assert bool(caveat) == (not create(name).agrees_in_backward), name
        if caveat:
            assert caveat.startswith("train.py changes gradients between backward() and sync.step().")
            assert "sync.step(max_norm=…)" in caveat
    assert of_changed(pool, tmp_path, f"{__name__}:Sum", clip)["factor"] == pytest.approx(2)


def test_a_change_that_the_mean_preserves_needs_no_caveat(pool: Pool, tmp_path: Path) -> None:
    pool.run(probe, 2, str(tmp_path), OracleTask, "ddp", torch.float64, 1.0, None, halve)
    for name in ("ddp", "allreduce"):
        found = of_changed(pool, tmp_path, name, halve)
        assert found["error"] < 1e-14
        assert "caveat" not in found
