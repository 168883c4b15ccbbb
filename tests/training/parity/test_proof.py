"""Tests of the proof: every lossless strategy has the gradients and the weights of one process on the same shards."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import Dataset

from paceline.comm import Comm
from paceline.config import RunConfig
from paceline.errors import ParityError
from paceline.records.parity import Parity
from paceline.strategies.base.strategy import AfterBackward, Strategy
from paceline.strategies.registry import create
from paceline.training.batchnorm import relative_divergence
from paceline.training.parity.difference import Gradients
from paceline.training.parity.oracle import Shards, oracle
from paceline.training.parity.proof import prove, take_shards
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, make_source
from paceline.workloads.workload import Workload
from ranks import Pool, RankFailed
from registered import LOSSLESS, in_turn, one_of_each_family, with_options
from training import cases

pytestmark = pytest.mark.takes(45)

SMALL = {
    "ring": "segment_kb=256",
    "halving_doubling": "segment_kb=256",
    "bucketed": "bucket_mb=0.01,first_mb=0.003",
    "priority": "slice_mb=0.01",
}
VARIANTS = {"ddp:overlap=false": 2, "ddp:bucket_mb=0.01,bucket_view=true": 4, "parameter_server:servers=2": 3}
"""Variants of strategies that are proven on two, three or four ranks, each on the given number."""
PROVEN = [*with_options(LOSSLESS, SMALL), *VARIANTS]
BATCHNORMS = ["broadcast", "local", "sync"]
IN_FULL_SIZE = ["ddp", "shared_memory"]
LARGE = ["vgg11"]
STEPS = 3

_known: dict[tuple[str, int, RunConfig], tuple[Shards, list[Gradients] | None]] = {}
"""Cache of each rank: see `_shards_and_oracle`."""
_trained: dict[tuple[str, int, RunConfig], Tensor] = {}
"""Cache of rank 0: the weights of one process after ten steps."""


def proof(comm: Comm, strategy: str, case: str, settings: dict[str, Any], scaled: bool = False) -> Parity:
    """Return the verdict, the same on every rank."""
    config = RunConfig(**{"batch": 12, "precision": "fp64", "augment": False} | settings)
    dtype = torch.float32 if config.precision == "fp32" else torch.float64
    share = Share(comm.rank, comm.world_size, config.accumulate, comm.device, dtype)
    chosen = WRONG[strategy]() if strategy in WRONG else create(strategy, allow_unused=config.allow_unused)
    workload = OWN[case]() if case in OWN else cases.make(case)
    workload.model.to(dtype)
    other_side = () if case in OWN else _shards_and_oracle(workload, case, share, config, comm)
    scaler = GradScaler("cpu") if scaled else None
    return prove(chosen, workload, share, config, comm, STEPS, *other_side, scaler=scaler)


def _shards_and_oracle(
    workload: Workload, case: str, share: Share, config: RunConfig, comm: Comm
) -> tuple[Shards, list[Gradients] | None]:
    """Return the shards and, on rank 0, the oracle's gradients; cached, since all strategies use the same."""
    key = case, comm.world_size, config
    if key not in _known:
        shards = take_shards(workload, share, config, comm, STEPS)
        right = oracle(workload, shards.all_ranks, share, config) if comm.rank == 0 else None
        if case in LARGE:  # Half a gigabyte, so only one is kept.
            for other in [other for other in _known if other[0] in LARGE]:
                del _known[other]
        _known[key] = shards, right
    return _known[key]


def check(pool: Pool, ranks: int, strategy: str, case: str, **settings: Any) -> None:
    verdicts = pool.run(proof, ranks, strategy, case, settings)
    assert verdicts == [verdicts[0]] * ranks
    verdicts[0].check()
    assert verdicts[0].error < 1e-10


CASES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "cnn": ("cnn", lambda _: {}),
    "tied": ("tied", lambda _: {}),
    "frozen": ("frozen", lambda _: {}),
    "dropout": ("dropout", lambda _: {}),
    "uneven shares": ("cnn", lambda ranks: {"batch": 4 * ranks + 1}),
    "accumulation and clipping": ("cnn", lambda _: {"batch": 11, "accumulate": 2, "clip_norm": 0.01}),
    **{f"bn {bn}": ("small_bn", lambda ranks, bn=bn: {"bn": bn, "batch": ranks + 1}) for bn in BATCHNORMS},
}
"""Models, and the settings that each is trained with on a given number of ranks."""


def pairs() -> Iterator[Any]:
    """Yield every case with one strategy of each family, another with each case, on 2, 3 or 4 ranks in turn.

    The other strategies and numbers of ranks run in the soak.
    """
    for first, strategy in enumerate(PROVEN):
        sizes = [VARIANTS[strategy]] if strategy in VARIANTS else [2, 3, 4]
        for second, case in enumerate(CASES):
            in_suite = strategy in one_of_each_family(PROVEN, second)
            for ranks in sizes:
                now = in_suite and ranks == sizes[(first + second) % len(sizes)]
                yield pytest.param(strategy, case, ranks, marks=() if now else pytest.mark.soak)


def strategies_with(*cases: str) -> list[Any]:
    """Return pairs of a strategy and a case. With each case, the suite has other strategies of a family."""
    return [
        pytest.param(*strategy.values, case, marks=strategy.marks)
        for turn, case in enumerate(cases)
        for strategy in in_turn(PROVEN, turn)
    ]


@pytest.mark.parametrize(("strategy", "case", "ranks"), list(pairs()))
def test_gradients(pool: Pool, strategy: str, case: str, ranks: int) -> None:
    """Parity in double precision."""
    model, settings = CASES[case]
    check(pool, ranks, strategy, model, **settings(ranks))


def vgg11_cases() -> list[tuple[str, str, int]]:
    """Return each strategy with a BatchNorm mode and a number of ranks, in an order in which few oracles are made."""
    chosen = {strategy: (BATCHNORMS[number % 3], 2 + number % 2) for number, strategy in enumerate(PROVEN)}
    chosen |= dict.fromkeys(IN_FULL_SIZE, ("local", 3))
    return sorted(((strategy, *case) for strategy, case in chosen.items()), key=lambda one: one[1:])


@pytest.mark.parametrize(("strategy", "bn", "ranks"), vgg11_cases())
def test_gradients_of_vgg11(pool: Pool, strategy: str, bn: str, ranks: int) -> None:
    """Cover every strategy and every BatchNorm mode, but not every pair. In full size, where a proof takes seconds,
    cover DDP's buckets and those in shared memory, with the sizes that their defaults are made for."""
    case = "vgg11" if strategy in IN_FULL_SIZE else "slim_vgg11"
    check(pool, ranks, strategy, case, bn=bn, batch=ranks + 1)


@pytest.mark.parametrize("strategy", LOSSLESS)
def test_gradients_of_a_scaled_loss(pool: Pool, strategy: str) -> None:
    settings = {"batch": 11, "accumulate": 2, "clip_norm": 0.01}
    verdicts = pool.run(proof, 2, strategy, "cnn", settings, True)
    verdicts[0].check()
    assert verdicts[0].error < 1e-10


class Summing(AfterBackward):
    """Common mistake: the sum instead of the mean."""

    name: ClassVar[str] = "summing"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)


class Breaking(AfterBackward):
    """Division by zero on one rank in one step: `max` would skip the NaN."""

    name: ClassVar[str] = "breaking"
    calls = 0

    def agree(self, gradients: Sequence[Tensor]) -> None:
        self.calls += 1
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)
            gradient /= math.nan if (self.comm.rank, self.calls) == (1, 2) else self.comm.world_size


class NotClipping(AfterBackward):
    """Mean without clipping."""

    name: ClassVar[str] = "not_clipping"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)
            gradient /= self.comm.world_size

    def update(self, max_norm: float | None, scaler: GradScaler | None = None) -> None:  # noqa: ARG002
        super().update(None)


class NotUnscaling(NotClipping):
    """Mean that stays scaled."""

    name: ClassVar[str] = "not_unscaling"

    def update(self, max_norm: float | None, scaler: Any = None) -> None:  # noqa: ARG002
        Strategy.update(self, max_norm)


class WrongInOneParameter(AfterBackward):
    """Mean, but the sum of a single small parameter."""

    name: ClassVar[str] = "wrong_in_one"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        for (name, _), gradient in zip(self.parameters, gradients, strict=True):
            dist.all_reduce(gradient, group=self.comm.group)
            if "faint" not in name:
                gradient /= self.comm.world_size


class SkipsOneParameter(AfterBackward):
    """Mean, but a single small parameter is not exchanged."""

    name: ClassVar[str] = "skips_one"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        for (name, _), gradient in zip(self.parameters, gradients, strict=True):
            if "faint" not in name:
                dist.all_reduce(gradient, group=self.comm.group)
                gradient /= self.comm.world_size


WRONG: dict[str, Callable[[], AfterBackward]] = {
    "wrong_in_one": WrongInOneParameter,
    "skips_one": SkipsOneParameter,
    "summing": Summing,
    "breaking": Breaking,
    "not_clipping": NotClipping,
    "not_unscaling": NotUnscaling,
}


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_sum_is_found_out_and_named(pool: Pool, clip_norm: float | None) -> None:
    verdict = pool.run(proof, 3, "summing", "cnn", {"clip_norm": clip_norm})[0]
    assert not verdict.unproven
    with pytest.raises(ParityError, match="3 times the mean over the ranks: it sums instead of averaging"):
        verdict.check()


def test_no_synchronisation_is_found_out(pool: Pool) -> None:
    verdict = pool.run(proof, 2, "none", "cnn", {})[0]
    assert verdict.error > 0.01
    with pytest.raises(ParityError):
        verdict.check()


def test_what_is_no_number_is_found_out(pool: Pool) -> None:
    verdicts = pool.run(proof, 2, "breaking", "frozen", {})
    assert [verdict.error for verdict in verdicts] == [math.inf] * 2
    with pytest.raises(ParityError, match="not finite"):
        verdicts[0].check()


def test_no_clipping_is_found_out(pool: Pool) -> None:
    assert pool.run(proof, 2, "not_clipping", "frozen", {})[0].holds
    with pytest.raises(ParityError, match="off by a factor"):
        pool.run(proof, 2, "not_clipping", "frozen", {"clip_norm": 0.01})[0].check()


def test_gradients_that_stay_scaled_are_found_out(pool: Pool) -> None:
    assert pool.run(proof, 2, "not_unscaling", "frozen", {})[0].holds
    with pytest.raises(ParityError, match=r"off by a factor of 6.554e\+04"):
        pool.run(proof, 2, "not_unscaling", "frozen", {}, True)[0].check()


def test_a_step_that_a_scaler_skips_is_found_out(pool: Pool) -> None:
    verdicts = pool.run(proof, 2, "breaking", "frozen", {}, True)
    assert [verdict.error for verdict in verdicts] == [math.inf] * 2


@pytest.mark.parametrize(("case", "precision"), [("faint", "fp32"), ("fainter", "fp64")])
def test_an_error_in_a_small_parameter_is_found_and_named(pool: Pool, case: str, precision: str) -> None:
    assert pool.run(proof, 3, "allreduce", case, {"precision": precision})[0].holds
    verdict = pool.run(proof, 3, "wrong_in_one", case, {"precision": precision})[0]
    assert verdict.error < verdict.tolerance, "the error of the whole gradient does not show it"
    assert not verdict.unproven
    with pytest.raises(ParityError, match=r"the gradient of 3\.faint is 3 times the mean over the ranks: it sums"):
        verdict.check()
    with pytest.raises(ParityError, match=r"the gradient of 3\.faint is off by"):
        pool.run(proof, 3, "skips_one", case, {"precision": precision})[0].check()


@pytest.mark.parametrize(("strategy", "case"), strategies_with("cnn", "slim_vgg11", "residual", "attention"))
def test_rounding_in_single_precision_is_no_error(pool: Pool, strategy: str, case: str) -> None:
    """Three ranks, since a division by three rounds. Of many biases only rounding errors are left."""
    verdict = pool.run(proof, 3, strategy, case, {"precision": "fp32", "batch": 25})[0]
    assert not verdict.unproven
    verdict.check()


@pytest.mark.parametrize(("strategy", "case"), strategies_with("residual", "attention"))
def test_gradients_that_are_zero_up_to_rounding(pool: Pool, strategy: str, case: str) -> None:
    check(pool, 3, strategy, case, batch=13)


def samples(count: int = 96) -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(count, 6, dtype=torch.float64), torch.randint(0, 3, (count,))


def perceptron(*between: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.ReLU(), nn.Linear(8, 3)).double()


def classifier(model: nn.Module, train: Any, loss: Callable[[Any, Any], Tensor] = F.cross_entropy) -> Workload:
    return Workload(model=model, train=train, loss=loss)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Data set with different noise each time a sample is read, like random crops, whatever is seeded."""

    def __init__(self) -> None:
        self.x, self.y = samples()
        self.numbers = np.random.default_rng()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + torch.from_numpy(self.numbers.normal(size=6)), self.y[index]


class FunctionalDropout(nn.Module):
    """Dropout by a function instead of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Annealed(nn.Module):
    """Model with state outside its buffers: the third forward pass differs from the first."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * self.passes


class Running(nn.Module):
    """Model with a buffer that depends on all previous shards, and that its output depends on."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.detach().mean(0), 0.5)
        return x - self.seen.clone()


class Faint(nn.Module):
    """Layer whose only parameter has a gradient that is small beside all others."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.faint = nn.Parameter(torch.zeros(1))
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.by * self.faint)


def faint(by: float) -> Workload:
    """Return a model of 164,000 numbers, one of which has a gradient `by` times the size of others."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 400), Faint(by), nn.ReLU(), nn.Linear(400, 3))
    return classifier(model.double(), samples())


class Attention(nn.Module):
    """A layer of attention, whose bias of keys has a gradient of zero, up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layer(self.embedding(tokens)).mean(1))


def attention() -> Workload:
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (96, 9))
    return classifier(Attention(), (tokens[:, :8], tokens[:, 8]))


class Residual(nn.Module):
    """A block of a ResNet, with biases before BatchNorm: their gradients are zero, up to rounding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second_norm(self.second(F.relu(self.first_norm(self.first(x))))))


def residual() -> Workload:
    torch.manual_seed(2)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.AvgPool2d(2), Residual(8)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return classifier(model, (torch.randn(96, 3, 16, 16), torch.randint(0, 3, (96,))))


def generator() -> Workload:
    """Return batches that can be iterated once; the last ones are too small for three steps."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        x, y = samples()
        yield x[:11], y[:11]
        yield x[11:25], y[11:25]

    return classifier(perceptron(), batches())


def unseeded() -> Workload:
    """Return a loss with its own random numbers, which does not repeat."""
    numbers = np.random.default_rng()
    return classifier(
        perceptron(), samples(), lambda output, target: F.cross_entropy(output, target) * numbers.random()
    )


def not_a_mean() -> Workload:
    """Return a loss with class weights: that of two shards is not the mean of their losses."""
    weight = torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)
    return classifier(
        perceptron(nn.BatchNorm1d(8)), samples(), lambda output, target: F.cross_entropy(output, target, weight)
    )


def spectral(norm: Callable[[nn.Module], nn.Module]) -> Workload:
    """Return a model whose forward pass in training depends on buffers."""
    return classifier(perceptron(norm(nn.Linear(8, 8))), samples())


OWN: dict[str, Callable[[], Workload]] = {
    "faint": lambda: faint(8e-5),
    "fainter": lambda: faint(1e-10),
    "attention": attention,
    "residual": residual,
    "generator": generator,
    "augmented": lambda: classifier(perceptron(), Augmented()),
    "spectral_norm": lambda: spectral(nn.utils.parametrizations.spectral_norm),
    "old_spectral_norm": lambda: spectral(nn.utils.spectral_norm),
    "annealed": lambda: classifier(perceptron(Annealed()), samples()),
    "running": lambda: classifier(perceptron(Running()), samples()),
    "in_place": lambda: classifier(nn.Sequential(nn.ReLU(inplace=True), perceptron()), samples()),
    "few": lambda: classifier(perceptron(), samples(10)),
    "bn_dropout": lambda: classifier(perceptron(nn.BatchNorm1d(8), nn.Dropout(0.5)), samples()),
    "bn_functional_dropout": lambda: classifier(perceptron(nn.BatchNorm1d(8), FunctionalDropout()), samples()),
    "no_gradient": lambda: classifier(perceptron(), samples(), lambda output, target: (output * 0 * target[0]).mean()),
    "no_number": lambda: classifier(perceptron(), samples(), lambda output, target: (output / 0 * target[0]).mean()),
    "unseeded": unseeded,
    "not_a_mean": not_a_mean,
    "nothing": lambda: classifier(perceptron(), []),
}


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("small_bn", {"bn": "sync", "accumulate": 2}),
        ("small_bn", {"bn": "sync", "accumulate": 3, "batch": 13}),
        ("bn_dropout", {"bn": "sync", "accumulate": 2}),
        ("dropout", {"bn": "sync"}),
        ("generator", {}),
        ("generator", {"bn": "sync", "accumulate": 2}),
        ("augmented", {"clip_norm": 0.01}),
        ("spectral_norm", {}),
        ("spectral_norm", {"bn": "local", "accumulate": 2}),
        ("spectral_norm", {"bn": "sync", "accumulate": 2}),
        ("old_spectral_norm", {}),
        ("annealed", {"accumulate": 2}),
        ("running", {"accumulate": 2}),
        ("running", {"bn": "local"}),
        ("in_place", {}),
        ("few", {"batch": 10, "clip_norm": 0.01}),
        ("no_gradient", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
def test_a_right_strategy_is_not_refused(pool: Pool, case: str, settings: dict[str, Any]) -> None:
    check(pool, 3, "allreduce", case, **settings)
    verdict = pool.run(proof, 3, "summing", case, settings)[0]
    assert verdict.holds == (case == "no_gradient"), "and a wrong one is"
    assert not verdict.unproven


@pytest.mark.parametrize(
    ("case", "bn", "why"),
    [
        ("unseeded", "broadcast", "computes different gradients when it repeats"),
        ("no_number", "broadcast", "not finite"),
        ("not_a_mean", "sync", "use --bn broadcast to prove"),
        ("bn_functional_dropout", "sync", "use --bn broadcast to prove"),
    ],
)
def test_a_workload_that_says_nothing_about_a_strategy_is_unproven(pool: Pool, case: str, bn: str, why: str) -> None:
    verdicts = pool.run(proof, 2, "allreduce", case, {"bn": bn})
    assert verdicts[0] == verdicts[1]
    assert not verdicts[0].holds
    assert why in verdicts[0].unproven
    assert why in verdicts[0].unproven
    verdicts[0].check()


def test_data_without_a_batch_is_named(pool: Pool) -> None:
    with pytest.raises(RankFailed, match="WorkloadError: the training data has no batch"):
        pool.run(proof, 2, "allreduce", "nothing", {})


def ten_steps(comm: Comm, strategy: str, case: str, bn: str) -> tuple[Tensor, Tensor | None, float]:
    """Return the weights after ten steps: this rank's, one process's on rank 0, and the distance between ranks."""
    config = RunConfig(batch=3 * comm.world_size + 1, precision="fp64", augment=False, bn=bn)  # type: ignore[arg-type]
    share = Share(comm.rank, comm.world_size, 1, comm.device, torch.float64)
    workload = cases.make(case)
    alone = copy.deepcopy(workload.model)
    sync = Sync(workload.model, sgd, create(strategy), comm, config.bn)
    source = make_source(workload.train, share, batch=config.global_batch(comm.world_size), seed=0)
    steps = [(epoch, pieces) for epoch in range(20) for pieces in source.epoch(epoch)][:10]
    for _, (piece,) in steps:
        loss = workload.forward(sync.model, source.fetch(piece)).loss
        (loss * piece.weight).backward()
        sync.step()
    apart = relative_divergence(list(workload.model.parameters()), comm)
    sync.close()
    key = case, comm.world_size, config
    if comm.rank == 0 and key not in _trained:
        _trained[key] = train_alone(alone, workload, share, config)
    return weights(workload.model), _trained.get(key), apart


def train_alone(model: torch.nn.Module, workload: Any, share: Share, config: RunConfig) -> Tensor:
    """Return the weights of one process after ten steps on the same shards."""
    workers = 1 if config.bn == "sync" else share.workers
    sources = [
        make_source(
            workload.train,
            dataclasses.replace(share, rank=rank, workers=workers),
            batch=config.global_batch(share.workers),
            seed=0,
        )
        for rank in range(workers)
    ]
    optimizer = sgd(list(model.named_parameters()))
    shards = [[pieces for epoch in range(20) for pieces in source.epoch(epoch)][:10] for source in sources]
    for step in range(10):
        for source, steps in zip(sources, shards, strict=True):
            for piece in steps[step]:
                loss = workload.forward(model, source.fetch(piece)).loss
                (loss * piece.weight / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


@pytest.mark.parametrize(
    ("strategy", "case"), strategies_with("cnn broadcast", "tied broadcast", "small_bn local", "small_bn sync")
)
def test_ten_steps_end_in_the_weights_of_one_process(pool: Pool, strategy: str, case: str) -> None:
    ranks = 2 + PROVEN.index(strategy) % 3
    model, bn = case.split()
    results = pool.run(ten_steps, ranks, strategy, model, bn)
    expected = results[0][1]
    for found, _, apart in results:
        assert (found - expected).norm() / expected.norm() < 1e-8
        assert apart == 0.0


def test_p2p_is_gather_scatter_to_the_last_bit(pool: Pool) -> None:
    one, other = (pool.run(ten_steps, 3, name, "cnn", "local")[1][0] for name in ("p2p", "gather_scatter"))
    assert torch.equal(one, other)


def oracles(comm: Comm) -> list[dict[str, Tensor]]:
    """Return the oracle's gradients of the first step, for the split over these ranks; on rank 0 only."""
    workload = cases.make("cnn")
    config = RunConfig(batch=13, precision="fp64", augment=False)
    share = Share(comm.rank, comm.world_size, 1, comm.device, torch.float64)
    shards = take_shards(workload, share, config, comm, 1)
    return oracle(workload, shards.all_ranks, share, config) if comm.rank == 0 else []


def test_the_oracle_is_the_undivided_batch_without_batchnorm(pool: Pool) -> None:
    (sharded,), (whole,) = (pool.run(oracles, ranks)[0] for ranks in (4, 1))
    for name, gradient in whole.items():
        torch.testing.assert_close(sharded[name], gradient, rtol=1e-10, atol=1e-12)
