"""Every lossless strategy computes the mean gradient, and trains to the weights, of one process on the same shards."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import Comm
from paceline.config import RunConfig
from paceline.errors import ParityError
from paceline.strategies.base import AfterBackward
from paceline.strategies.registry import ENTRIES, create
from paceline.training.batchnorm import spread
from paceline.training.parity import Parity, oracle, prove
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, make_source
from ranks import Pool
from training import cases

LOSSLESS = ["gather_scatter", "p2p", "allreduce", "ddp", "ddp:overlap=false", "ddp:bucket_mb=0.01,bucket_view=true"]


def proof(comm: Comm, strategy: str, case: str, settings: dict[str, Any]) -> Parity:
    """The verdict, which every rank comes to."""
    config = RunConfig(**{"batch": 12, "precision": "fp64", "augment": False} | settings)
    share = Share(comm.rank, comm.world_size, config.accumulate, comm.device, torch.float64)
    chosen = Summing() if strategy == "summing" else create(strategy, allow_unused=config.allow_unused)
    return prove(chosen, cases.make(case), share, config, comm)


def check(pool: Pool, ranks: int, strategy: str, case: str, **settings: Any) -> None:
    verdicts = pool.run(proof, ranks, strategy, case, settings)
    assert verdicts == [verdicts[0]] * ranks
    verdicts[0].check()
    assert verdicts[0].error < 1e-10


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", LOSSLESS)
class TestGradients:
    """Parity of gradients, in double precision."""

    @pytest.mark.parametrize("case", ["cnn", "tied", "frozen", "dropout"])
    def test_of_models(self, pool: Pool, strategy: str, ranks: int, case: str) -> None:
        check(pool, ranks, strategy, case)

    def test_of_uneven_shares(self, pool: Pool, strategy: str, ranks: int) -> None:
        check(pool, ranks, strategy, "cnn", batch=4 * ranks + 1)

    def test_of_accumulation_and_clipping(self, pool: Pool, strategy: str, ranks: int) -> None:
        check(pool, ranks, strategy, "cnn", batch=11, accumulate=2, clip_norm=0.01)


@pytest.mark.parametrize("bn", ["broadcast", "local", "sync"])
@pytest.mark.parametrize("strategy", LOSSLESS)
def test_gradients_of_vgg11(pool: Pool, strategy: str, bn: str) -> None:
    ranks = 2 + (LOSSLESS.index(strategy) + ["broadcast", "local", "sync"].index(bn)) % 3
    check(pool, ranks, strategy, "vgg11", bn=bn, batch=ranks + 1)


def test_every_lossless_strategy_is_proven() -> None:
    proven = {text.partition(":")[0] for text in LOSSLESS}
    assert {name for name in ENTRIES if create(name).lossless} - {"single"} == proven


class Summing(AfterBackward):
    """The mistake that people make: the sum, not the mean."""

    name: ClassVar[str] = "summing"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)


def test_a_sum_is_found_out_and_named(pool: Pool) -> None:
    verdict = pool.run(proof, 3, "summing", "cnn", {})[0]
    with pytest.raises(ParityError, match="3 times the mean over the ranks: it sums instead of averaging"):
        verdict.check()


def test_no_synchronisation_is_found_out(pool: Pool) -> None:
    verdict = pool.run(proof, 2, "none", "cnn", {})[0]
    assert verdict.error > 0.01
    with pytest.raises(ParityError):
        verdict.check()


def ten_steps(comm: Comm, strategy: str, case: str, bn: str) -> tuple[Tensor, Tensor, float]:
    """The weights after ten steps: this rank's, those of one process, and how far the ranks' are apart."""
    config = RunConfig(batch=3 * comm.world_size + 1, precision="fp64", augment=False, bn=bn)  # type: ignore[arg-type]
    share = Share(comm.rank, comm.world_size, 1, comm.device, torch.float64)
    workload = cases.make(case)
    alone = copy.deepcopy(workload.model)
    sync = Sync(workload.model, sgd, create(strategy), comm, config.bn)
    source = make_source(workload.train, share, batch=config.global_batch(comm.world_size), seed=0)
    steps = [(epoch, pieces) for epoch in range(20) for pieces in source.epoch(epoch)][:10]
    for _, (piece,) in steps:
        loss = workload.evaluate(sync.model, source.fetch(piece)).loss
        (loss * piece.weight).backward()
        sync.step()
    apart = spread(list(workload.model.parameters()), comm)
    sync.close()
    return weights(workload.model), train_alone(alone, workload, share, config), apart


def train_alone(model: torch.nn.Module, workload: Any, share: Share, config: RunConfig) -> Tensor:
    """Ten steps of one process on the same shards."""
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
                loss = workload.evaluate(model, source.fetch(piece)).loss
                (loss * piece.weight / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


@pytest.mark.parametrize(("strategy", "ranks"), [(s, 2 + i % 3) for i, s in enumerate(LOSSLESS)])
@pytest.mark.parametrize(
    ("case", "bn"), [("cnn", "broadcast"), ("tied", "broadcast"), ("small_bn", "local"), ("small_bn", "sync")]
)
def test_ten_steps_end_in_the_weights_of_one_process(pool: Pool, strategy: str, ranks: int, case: str, bn: str) -> None:
    for found, expected, apart in pool.run(ten_steps, ranks, strategy, case, bn):
        assert (found - expected).norm() / expected.norm() < 1e-8
        assert apart == 0.0


def test_p2p_is_gather_scatter_to_the_last_bit(pool: Pool) -> None:
    one, other = (pool.run(ten_steps, 3, name, "cnn", "local")[1][0] for name in ("p2p", "gather_scatter"))
    assert torch.equal(one, other)


def test_the_oracle_is_the_undivided_batch_without_batchnorm() -> None:
    workload = cases.make("cnn")
    config = RunConfig(batch=13, precision="fp64", augment=False)
    share = Share(0, 4, 1, torch.device("cpu"), torch.float64)
    sharded = oracle(copy.deepcopy(workload.model), workload, share, config, steps=1)[0]
    whole = oracle(workload.model, workload, dataclasses.replace(share, workers=1), config, steps=1)[0]
    for name, gradient in whole.items():
        torch.testing.assert_close(sharded[name], gradient, rtol=1e-10, atol=1e-12)
