"""Tests of steps that are replayed: on a CPU, by a capturer with the rules of a CUDA graph."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.analysis.resources import rank_usage, usage
from paceline.analysis.traffic.payload import payload_of
from paceline.comm import Comm, World, open_comm
from paceline.config import RunConfig
from paceline.measure.steps import make_stopwatch
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.events import CudaGraphEvent, LogEvent
from paceline.records.schema import GRAPHS
from paceline.training import gradient_noise
from paceline.training.gradient_noise import NoiseSampler
from paceline.training.graphs import capture
from paceline.training.graphs.capture import CaptureError
from paceline.training.graphs.graphed_step import MOST_FORMS, NO_MEMORY, GraphedStep
from paceline.training.graphs.trial import STEPS, Snapshot
from paceline.training.graphs.update import prepare_for_capture
from paceline.training.run import run
from paceline.workloads.batches import MicroBatch
from paceline.workloads.workload import Workload, count_top1
from ranks import SIZE, Pool, RankFailed
from training.graphs.recorded_graph import RecordingCapturer

CPU = torch.device("cpu")
SAMPLES, CLASSES = 70, 3
NOISE_PERIOD = 4
AFTER_BACKWARD = ["allreduce", "gather_scatter", "p2p", "ring", "halving_doubling", "tree", "none"]


# Workloads.


def plain(*extra: nn.Module, samples: int = SAMPLES, **parts: Any) -> Workload:
    """Return a small model with BatchNorm; the last batch of its epochs is smaller than the others."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *extra, nn.Flatten(), nn.Linear(64, CLASSES)]
    x = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    data = x, torch.arange(samples) % CLASSES
    return Workload(
        model=nn.Sequential(*layers), train=data, test=data, loss=F.cross_entropy, correct=count_top1, **parts
    )


def with_sgd(scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler], **parts: Any) -> Workload:
    """Return the small model with torch's SGD and a scheduler of torch."""
    return plain(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9), scheduler=scheduler, **parts
    )


def wide() -> Workload:
    """Return a model whose gradients are larger than the loop's own messages."""
    return plain(nn.Flatten(), nn.Linear(64, 1000), nn.Linear(1000, 64))


def with_dropout() -> Workload:
    return plain(nn.Dropout(0.5))


class RandomDepth(nn.Module):
    """Layer that Python skips by chance, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else 3 * x


class RareDepth(nn.Module):
    """Layer that Python skips so rarely that a few steps do not show it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 1e-9 else 3 * x


class CountsCalls(nn.Module):
    """Layer that counts its calls in Python, as schedules inside a model do, and changes after the tenth."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x if self.calls > 10 else 2 * x


CALLS = itertools.count(1)


class CountsElsewhere(nn.Module):
    """Layer that counts its calls where only its results show it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + next(CALLS) % 3)


class KeepsMean(nn.Module):
    """Layer that keeps a running mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x - self.mean


class ReplacesMean(nn.Module):
    """Layer that makes a new tensor of its running mean in each step."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x


class ReplacesMomentum(torch.optim.Optimizer):
    """Optimiser that makes a new tensor of its momentum in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                before = self.state[parameter].get("momentum", torch.zeros_like(parameter))
                self.state[parameter]["momentum"] = 0.9 * before + parameter.grad
                parameter.sub_(self.state[parameter]["momentum"] * group["lr"])


class ReadsValue(nn.Module):
    """Layer that reads a value on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 1e9 else x


class CountsInPython(torch.optim.SGD):
    """Optimiser that counts its steps in Python, and stops after the third."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return super().step(closure)


class KeepsRate(torch.optim.Optimizer):
    """Optimiser that uses the learning rate that it was made with."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.01)


class KeepsOneRate(torch.optim.Optimizer):
    """Optimiser that reads the learning rate of its first group, and keeps that of the second."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__([{"params": parameters[:1]}, {"params": parameters[1:]}], {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (0.01 if number else group["lr"]))


def random_depth() -> Workload:
    return plain(RandomDepth())


def rare_depth() -> Workload:
    return plain(RareDepth())


def counts_calls() -> Workload:
    return plain(CountsCalls())


def counts_elsewhere() -> Workload:
    return plain(CountsElsewhere())


def keeps_mean() -> Workload:
    return plain(KeepsMean())


def replaces_mean() -> Workload:
    return plain(ReplacesMean())


def replaces_momentum() -> Workload:
    return plain(optimizer=ReplacesMomentum)


class DecaysLater(torch.optim.lr_scheduler.LambdaLR):
    """Scheduler that changes the weight decay once."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 7:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.1


def decays_later() -> Workload:
    """Return a workload whose weight decay changes from step 8 on; step 10, of fewer samples, has no graph yet."""
    return with_sgd(lambda optimizer, _: DecaysLater(optimizer, lambda _: 1.0), samples=149)


def names_batches() -> Workload:
    """Return a workload whose batches have names, which differ."""
    return _of_batches(lambda number: {"name": f"batch {number}"})


def many_sizes() -> Workload:
    """Return a workload whose batches have more sizes than are captured."""
    return _of_batches(lambda _: {}, sizes=range(2, 44, 2))


def _of_batches(extra: Callable[[int], dict[str, Any]], sizes: Sequence[int] = (16,) * 20) -> Workload:
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(size, 4, generator=generator), "y": torch.arange(size) % CLASSES, **extra(number)}
        for number, size in enumerate(sizes)
    ]
    torch.manual_seed(0)
    return Workload(
        model=nn.Linear(4, CLASSES),
        train=batches,
        step=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    )


def two_groups() -> Workload:
    """Return a workload whose optimiser reads the learning rate of one of its two groups."""
    return plain(optimizer=lambda parameters: KeepsOneRate([parameter for _, parameter in parameters]))


def one_cycle() -> Workload:
    """Return a workload whose scheduler changes the momentum in every step."""
    return with_sgd(
        lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
    )


def reads_value() -> Workload:
    return plain(ReadsValue())


def counts_in_python() -> Workload:
    return plain(optimizer=lambda parameters: CountsInPython(parameters, lr=0.01))


def keeps_rate() -> Workload:
    return plain(optimizer=KeepsRate)


def own_sgd() -> Workload:
    """Return a workload with an optimiser and a scheduler of torch, as users make them."""
    return with_sgd(lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))


# Runs on ranks of the pool.


def train(_: Comm, settings: dict[str, Any], folder: str, ranks: int) -> None:
    """Run on the first ranks; all ranks must help to open groups."""
    rank = dist.get_rank()
    if rank >= ranks:
        open_comm(range(ranks), device=CPU, backend="gloo", timeout_s=30, stopwatch=make_stopwatch(CPU, events=True))
        return
    world = World(
        rank, ranks, local_rank=rank, local_size=ranks, interface="lo", ranks_sharing_cores=1, store=dist.HashStore()
    )
    capture.CAPTURERS["cpu"] = RecordingCapturer
    try:
        run(RunConfig(**settings), world, RunFolder(Path(folder)), threads=1)
    finally:
        del capture.CAPTURERS["cpu"]


def train_measuring_some_steps(comm: Comm, settings: dict[str, Any], folder: str, ranks: int) -> list[int]:
    """Train, and measure gradient noise in every fourth step whatever it costs; return the steps that were replayed."""
    replayed = list[int]()

    def replay(step: GraphedStep, micro_batches: list[MicroBatch]) -> bool:
        replayed.append(step._steps - 1)
        return run_with_graphs(step, micro_batches)

    run_with_graphs = GraphedStep._run_with_graphs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_noise, "FIRST_PERIOD", NOISE_PERIOD)
        patch.setattr(NoiseSampler, "adapt", lambda *_: None)
        patch.setattr(GraphedStep, "_run_with_graphs", replay)
        train(comm, settings, folder, ranks)
    return replayed


def train_with_a_slow_trial(comm: Comm, settings: dict[str, Any], folder: str, ranks: int) -> None:
    """Train; the trial sleeps, so that its time shows in the CPU use."""

    def decide_late(step: GraphedStep) -> None:
        time.sleep(1)
        decide(step)

    decide = GraphedStep._decide
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphedStep, "_decide", decide_late)
        train(comm, settings, folder, ranks)


def train_with_little_memory(comm: Comm, settings: dict[str, Any], folder: str, call: int) -> None:
    """Train on rank 0, where the copies of a trial fail the `call`th time."""
    calls = itertools.count(1)

    def copied(tensors: Any, device: torch.device) -> Snapshot:
        if next(calls) == call:
            raise torch.OutOfMemoryError("no memory")
        return Snapshot(tensors, device)

    def copied_weights(step: GraphedStep) -> list[Tensor]:
        return copied(step._weights, CPU)._values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphedStep, "_snapshot", lambda step: copied(step._weights, CPU))
        patch.setattr(GraphedStep, "_copied_weights", copied_weights)
        _train_small(comm, settings, folder, ranks=1)


def train_with_a_rank_that_refuses(comm: Comm, settings: dict[str, Any], folder: str) -> None:
    """Train on two ranks, of which the second can capture nothing."""

    def refuse(*_: Any) -> None:
        raise CaptureError("nothing can be captured here.")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(GraphedStep, "_capture_trial", refuse)
        _train_small(comm, settings | {"workload": f"{__name__}:plain"}, folder, ranks=2)


def _train_small(comm: Comm, settings: dict[str, Any], folder: str, ranks: int) -> None:
    if dist.get_rank() == 0:
        RunFolder.create(Path(folder))
    dist.barrier()
    train(comm, settings | {"batch": 16, "epochs": 3, "cuda_graph": "auto"}, folder, ranks)


class Trained:
    """A run, with and without graphs."""

    def __init__(
        self,
        pool: Pool,
        folder: Path,
        mode: str | None,
        ranks: int,
        settings: dict[str, Any],
        job: Callable[..., Any] = train,
    ) -> None:
        out = folder / str(mode)
        settings = {"batch": 16, "epochs": 4, "precision": "fp64"} | settings
        settings["workload"] = f"{__name__}:{settings.get('workload', 'plain')}"
        settings |= {"cuda_graph": mode, "save": str(folder / f"{mode}.safetensors")}
        out.parent.mkdir(exist_ok=True)
        self.returned = pool.run(job, SIZE, settings, str(RunFolder.create(out).path), ranks)[0]
        self.record: RunRecord = read_run(out)
        self.losses = [loss for event in self.record.events_of(LogEvent) for loss in event.losses]
        self.weights = load_file(folder / f"{mode}.safetensors")

    @property
    def decision(self) -> CudaGraphEvent:
        (event,) = self.record.events_of(CudaGraphEvent)
        return event

    @property
    def decided_at(self) -> int:
        """Number of steps in the windows before the decision: four steps prepare it."""
        return next(event.step for event in self.record.events_of(LogEvent) if event.step > STEPS)


def both(
    pool: Pool, folder: Path, ranks: int = 1, job: Callable[..., Any] = train, **settings: Any
) -> tuple[Trained, Trained]:
    """Train with and without graphs; check that losses and weights are the same."""
    off, auto = (Trained(pool, folder, mode, ranks, settings, job) for mode in ("off", "auto"))
    assert auto.losses == pytest.approx(off.losses, rel=1e-5)
    for name, weight in off.weights.items():
        torch.testing.assert_close(auto.weights[name], weight, rtol=1e-5, atol=1e-6)
    return off, auto


RECIPE: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "schedule": "cosine", "warmup_steps": 4, "strategy": "single"}
"""Settings of workloads without an optimiser of their own."""
OWN_OPTIMIZERS = ("counts_in_python", "keeps_rate", "two_groups", "replaces_momentum")


@pytest.mark.parametrize("optimizer", ["sgd", "lars", "lamb", "muon"])
def test_graphs_train_as_steps_without_them(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    momentum = {"momentum": None} if optimizer == "lamb" else {}
    _, auto = both(pool, tmp_path, **RECIPE | {"optimizer": optimizer} | momentum)
    assert auto.decision.used, auto.decision.reason


@pytest.mark.parametrize("strategy", AFTER_BACKWARD)
def test_strategies_that_act_after_backward(pool: Pool, tmp_path: Path, strategy: str) -> None:
    off, auto = both(pool, tmp_path, ranks=2, **RECIPE | {"strategy": strategy})
    assert auto.decision.used, auto.decision.reason
    assert auto.record.summary is not None
    assert off.record.summary is not None
    assert auto.record.summary.train_accuracy == off.record.summary.train_accuracy


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 3},
        {"clip_norm": 0.1},
        {"eval_every": "5"},
        {"workload": "with_dropout"},
        {"workload": "keeps_mean"},
        {"precision": "bf16"},
        {"bn": "local", "ranks": 2, "strategy": "allreduce"},
        {"accumulate": 2, "ranks": 2, "strategy": "ring", "batch": 13},
    ],
    ids=str,
)
def test_settings_of_a_run(pool: Pool, tmp_path: Path, settings: dict[str, Any]) -> None:
    _, auto = both(pool, tmp_path, **RECIPE | settings)
    assert auto.decision.used, auto.decision.reason


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2},
        {"accumulate": 2, "clip_norm": 0.1, "eval_every": "1"},
        {"ranks": 2, "strategy": "allreduce"},
        {"accumulate": 2, "ranks": 2, "strategy": "ring", "batch": 13},
    ],
    ids=str,
)
def test_steps_whose_noise_is_measured_are_trained_without_graphs(
    pool: Pool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """One step of the trial is measured, too; the trial trains it again without adding to the figures."""
    off, auto = both(pool, tmp_path, job=train_measuring_some_steps, **RECIPE | {"noise_scale": "auto"} | settings)
    assert auto.decision.used, auto.decision.reason
    measured = range(1, len(auto.losses), NOISE_PERIOD)
    assert [steps for steps, *_ in map(noise_sums, (off, auto))] == [len(measured)] * 2
    assert noise_sums(auto) == pytest.approx(noise_sums(off), rel=1e-5)
    assert auto.returned == [step for step in range(auto.decided_at, len(auto.losses)) if step not in measured]


def noise_sums(run: Trained) -> tuple[int, float, float]:
    """Return the number of measured steps of a run, and the sums of their figures."""
    found = [event.noise for event in run.record.events_of(LogEvent) if event.noise is not None]
    return (
        sum(noise.steps for noise in found),
        sum(noise.steps * noise.gradient_sq for noise in found),
        sum(noise.steps * noise.trace for noise in found),
    )


@pytest.mark.parametrize("mode", ["auto", "all"])
def test_noise_that_cannot_be_measured_does_not_prevent_graphs(pool: Pool, tmp_path: Path, mode: str) -> None:
    """One rank without micro-batches has a single gradient per step."""
    _, auto = both(pool, tmp_path, job=train_measuring_some_steps, **RECIPE | {"noise_scale": mode})
    assert auto.decision.used, auto.decision.reason
    assert noise_sums(auto)[0] == 0
    assert auto.returned == list(range(auto.decided_at, len(auto.losses)))


@pytest.mark.parametrize("settings", [{}, {"eval_every": "10"}, {"bn": "local"}], ids=str)
def test_what_the_trial_sends_is_not_counted(pool: Pool, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = RECIPE | {"strategy": "allreduce", "precision": "fp32", "workload": "wide"} | settings
    off, auto = both(pool, tmp_path, ranks=2, **settings)
    assert auto.decision.used, auto.decision.reason
    for trained in (off, auto):
        counted = payload_of(trained.record)
        assert counted is not None
        assert counted.holds, counted.pairs
    assert auto.record.summary is not None
    assert off.record.summary is not None
    assert auto.record.summary.sockets is not None
    assert off.record.summary.sockets is not None
    assert auto.record.summary.sockets.steps == off.record.summary.sockets.steps > 0


def test_captures_are_marked_and_not_training(pool: Pool, tmp_path: Path) -> None:
    """The trial, and the smaller batch at the end of an epoch; a mark is between two steps."""
    run = Trained(pool, tmp_path, "auto", 1, RECIPE | {"steps": 40, "epochs": None}, train_with_a_slow_trial)
    trial, last_batch = (mark for mark in run.record.marks[0] if mark.kind == GRAPHS)
    steps = run.record.steps[0]
    ends = steps["start_s"] + steps.total_s
    for mark, step in ((trial, run.decided_at), (last_batch, 2 * run.decided_at)):
        assert ends[step - 1] <= mark.start_s < mark.end_s <= steps["start_s"][step]
    assert run.record.summary is not None
    (used,) = usage(run.record)
    assert used.cpu_share is not None
    assert run.record.summary.ranks[0].cpu_share == pytest.approx(used.cpu_share, rel=0.01)
    with_captures = rank_usage(0, run.record.resources[0], steps).cpu_share
    assert with_captures is not None
    assert with_captures < 0.8 * used.cpu_share


def test_the_user_s_own_optimiser_and_scheduler(pool: Pool, tmp_path: Path) -> None:
    _, auto = both(pool, tmp_path, strategy="single", workload="own_sgd")
    assert auto.decision.used, auto.decision.reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"workload": "random_depth"}, "the model draws random numbers on the host"),
        ({"workload": "rare_depth"}, "the model draws random numbers on the host"),
        ({"workload": "counts_calls"}, "`3` changes its attribute `calls` in Python"),
        ({"workload": "names_batches", "batch": None, "steps": 30}, "batches contain values that are not tensors"),
        ({"workload": "replaces_mean"}, "`3` replaces its tensor `mean` by another one"),
        ({"workload": "replaces_momentum"}, "the optimiser replaces tensors of its state by others"),
        ({"workload": "two_groups"}, "the optimiser does not read the learning rate from a tensor"),
        ({"workload": "reads_value"}, "the forward pass cannot be captured: RuntimeError: operation not permitted"),
        ({"workload": "counts_in_python"}, "the optimiser counts its steps in Python"),
        ({"workload": "keeps_rate"}, "the optimiser does not read the learning rate from a tensor"),
        ({"strategy": "ddp", "ranks": 2}, "ddp does more than update the weights after backward"),
        ({"strategy": "allreduce", "ranks": 2, "bn": "sync"}, "--bn sync exchanges statistics"),
        ({"on_nan": "skip"}, "--on-nan skip decides on the host"),
        ({"allow_unused": True}, "--allow-unused lets the parameters"),
        ({"noise_scale": "all", "accumulate": 2}, "--noise-scale all reads the gradients of every step"),
        ({"profile": "6-7"}, "--profile attributes time to operators"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_graph_cannot_train_is_trained_without(
    pool: Pool, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    recipe = {"strategy": "single"} if settings.get("workload") in OWN_OPTIMIZERS else RECIPE
    _, auto = both(pool, tmp_path, **recipe | settings)
    assert not auto.decision.used
    assert auto.decision.reason.startswith(reason), auto.decision.reason
    assert not auto.decision.is_expected, "--cuda-graph auto was given"


def test_results_that_differ_are_found(pool: Pool, tmp_path: Path) -> None:
    """The layer's state is neither a number of the model nor a random number, so only the losses show it."""
    decision = Trained(pool, tmp_path, "auto", 1, RECIPE | {"workload": "counts_elsewhere"}).decision
    assert not decision.used
    assert decision.reason.startswith("the losses of 3 steps differ by up to")


def test_many_forms_of_batches_are_captured_in_part(pool: Pool, tmp_path: Path) -> None:
    settings = RECIPE | {"workload": "many_sizes", "batch": None, "schedule": "constant", "epochs": None, "steps": 84}
    _, auto = both(pool, tmp_path, **settings)
    first, second = auto.record.events_of(CudaGraphEvent)
    assert (first.used, first.reason) == (True, "")
    assert second.used
    assert second.reason == f"micro-batches have more than {MOST_FORMS} forms, and the others are trained without."


def test_settings_that_change_in_every_step_are_used(pool: Pool, tmp_path: Path) -> None:
    """The momentum of a graph would be that of its capture; forward and backward remain graphs."""
    _, auto = both(pool, tmp_path, strategy="single", workload="one_cycle")
    assert auto.decision.used, auto.decision.reason


def test_a_setting_that_changes_once_is_used(pool: Pool, tmp_path: Path) -> None:
    """The update with the new weight decay is captured after a window whose last step left no gradients."""
    _, auto = both(pool, tmp_path, strategy="single", workload="decays_later", log_every=5)
    assert auto.decision.used, auto.decision.reason


@pytest.mark.parametrize("call", [1, 2, 3], ids=["before the trial", "after its steps", "before captures"])
def test_too_little_memory_for_a_trial_is_a_reason(pool: Pool, tmp_path: Path, call: int) -> None:
    pool.run(train_with_little_memory, SIZE, RECIPE | {"workload": f"{__name__}:plain"}, str(tmp_path / "run"), call)
    (decision,) = read_run(tmp_path / "run").events_of(CudaGraphEvent)
    assert not decision.used
    assert decision.reason == NO_MEMORY


def test_a_rank_that_cannot_capture_stops_no_other(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_with_a_rank_that_refuses, SIZE, RECIPE | {"strategy": "allreduce"}, str(tmp_path / "run"))
    (decision,) = read_run(tmp_path / "run").events_of(CudaGraphEvent)
    assert not decision.used
    assert decision.reason == "they cannot be used on another rank."


def test_the_choice_of_implementation_is_taken_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    take_back = prepare_for_capture(optimizer)
    assert optimizer.param_groups[0]["capturable"]
    take_back()
    assert not optimizer.param_groups[0]["capturable"]

    sgd = torch.optim.SGD([parameter], lr=0.1, foreach=True)
    take_back = prepare_for_capture(sgd)
    assert (sgd.param_groups[0]["fused"], sgd.param_groups[0]["foreach"]) == (True, False)
    take_back()
    assert (sgd.param_groups[0]["fused"], sgd.param_groups[0]["foreach"]) == (None, True)

    for other in (torch.optim.Adagrad([parameter]), torch.optim.SGD([nn.Parameter(torch.ones(1, dtype=torch.cfloat))])):
        prepare_for_capture(other)
        assert not other.param_groups[0]["fused"], type(other)


def test_graphs_are_the_default_and_silent_where_they_cannot_be(pool: Pool, tmp_path: Path) -> None:
    assert Trained(pool, tmp_path / "single", None, 1, RECIPE).decision.used
    decision = Trained(pool, tmp_path / "ddp", None, 2, RECIPE | {"strategy": "ddp"}).decision
    assert (decision.used, decision.is_expected) == (False, True)
    failed = Trained(pool, tmp_path / "trial", None, 1, RECIPE | {"workload": "random_depth"}).decision
    assert (failed.used, failed.is_expected) == (False, False)


def test_graphs_that_were_asked_for_are_not_replaced_in_silence(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="--cuda-graph on was given, but the model draws random numbers"):
        Trained(pool, tmp_path, "on", 1, RECIPE | {"workload": "random_depth"})


def test_a_replay_reads_inputs_and_learning_rates_anew(pool: Pool, tmp_path: Path) -> None:
    """The comparison above can fail: other samples and a constant learning rate give other losses."""
    first = Trained(pool, tmp_path, "auto", 1, RECIPE)
    other = Trained(pool, tmp_path / "other", "off", 1, RECIPE | {"schedule": "constant"})
    assert len(first.losses) == len(other.losses)
    assert first.losses != pytest.approx(other.losses, rel=1e-3)
