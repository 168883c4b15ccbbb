"""Training loops as a PyTorch user writes them, run under each strategy on two ranks and in one process.

A usage is a function that trains a small model in some way and returns tensors, for example the final weights. It gets
a `Loop`, whose `attach` returns a `Sync` on a rank, and an `Alone` in one process. The results must be the same, since
one process trains on the whole batch and each rank on its part.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from registered import LOSSLESS, one_of_each_family, with_options

RANKS = 2
STEPS = 4
TOLERANCE = 1e-10
"""Largest difference between ranks and one process, in double precision."""
SMALL_BUCKETS = {
    "ddp": "bucket_mb=0.0005",
    "bucketed": "bucket_mb=0.0005,first_mb=0.0002",
    "shared_memory": "bucket_mb=0.0005,first_mb=0.0002",
    "priority": "slice_mb=0.0005",
    "parameter_server": "servers=2",
    "halving_doubling": "segment_kb=0.5",
}
"""Options that make several messages of a small model's gradients."""
STRATEGIES = [*with_options(LOSSLESS, SMALL_BUCKETS), "ddp:overlap=false", "ddp:bucket_view=true"]

Results = list[Tensor]


class Alone:
    """Plain training in one process, with the methods of `Sync`."""

    rank, ranks = 0, 1

    def __init__(self, model: nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = model
        self.optimizer = make_optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])

    def accumulate(self) -> AbstractContextManager[None]:
        """Do nothing: gradients accumulate by themselves."""
        return nullcontext()

    def step(self, max_norm: float | None = None) -> None:
        """Clip the gradients, step the optimiser and clear the gradients."""
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.model.zero_grad()

    def weight(self, samples: int, batch: int) -> float:
        """Return the factor that makes a mean over `samples` a part of the mean over the batch."""
        return samples / batch

    def mean(self, value: float, samples: int = 1) -> float:  # noqa: ARG002
        """Return the value."""
        return value

    def agreed(self) -> AbstractContextManager[nn.Module]:
        """Return a context with the model."""
        return nullcontext(self.model)

    def detach(self) -> None:
        """Do nothing: nothing was added to the model."""


@dataclass
class Loop:
    """Access of a usage to the strategy, and to this process's part of the data."""

    text: str = ""
    """Strategy, with options."""
    comm: Comm | None = None
    """Ranks; None in one process."""
    attached: list[Any] = field(default_factory=list)

    def attach(
        self, model: nn.Module, make_optimizer: Any = None, *, bn: Any = "broadcast", allow_unused: bool = False
    ) -> Any:
        """Return a `Sync`, or its substitute in one process."""
        make_optimizer = make_optimizer or sgd
        if self.comm is None:
            made: Any = Alone(model, make_optimizer)
        else:
            strategy = create(self.text, allow_unused=allow_unused)
            made = Sync(model, make_optimizer, strategy, self.comm, bn)
        self.attached.append(made)
        return made

    @property
    def parts(self) -> range:
        """Numbers of the parts of a batch that this process trains: its own, or all in one process."""
        return range(RANKS) if self.comm is None else range(self.comm.rank, self.comm.rank + 1)

    def share(self, batch: Tensor) -> Tensor:
        """Return the samples of a batch that this process trains."""
        return batch if self.comm is None else batch[self.comm.rank :: RANKS]

    def batches(self, steps: int = STEPS, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return this process's inputs and targets for each step."""
        return [(self.share(x), self.share(y)) for x, y in map(batch_of, range(start, start + steps))]


Usage = Callable[[Loop], Results]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a global batch."""
    generator = torch.Generator().manual_seed(100 + step)
    draw = {"generator": generator, "dtype": torch.float64}
    return torch.randn(8, 6, **draw), torch.randn(8, 3, **draw)  # type: ignore[call-overload,no-any-return]


def make_model(build: Callable[[], nn.Module] | None = None) -> Any:
    """Return a small model in double precision, the same in every process: a perceptron, unless `build` is given."""
    torch.manual_seed(0)
    return (build or _perceptron)().double()


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(output, target)


def train(loop: Loop, sync: Any, steps: int = STEPS, start: int = 0) -> None:
    """Train some steps in the simplest way."""
    for x, y in loop.batches(steps, start):
        loss_of(sync.model(x), y).backward()
        sync.step()


def weights(model: nn.Module) -> Tensor:
    """Return all parameters as one vector; reading them applies updates that a strategy has deferred."""
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def run_usages(comm: Comm, text: str, usages: Sequence[tuple[str, str]]) -> dict[str, Results | str]:
    """Run usages one after the other on this rank, until one fails; return the results, or the traceback."""
    found: dict[str, Results | str] = {}
    for module, name in usages:
        usage: Usage = getattr(__import__(module, fromlist=[name]), name)
        loop = Loop(text, comm)
        try:
            found[name] = [one.detach().clone() for one in usage(loop)]
            for sync in loop.attached:
                sync.detach()
        except Exception:
            found[name] = traceback.format_exc()
            for sync in loop.attached:
                sync.strategy.abandon()
            break  # Another rank may be inside an operation of this group.
    return found


@cache
def run_alone(usage: Usage) -> Results:
    """Run a usage in this process, without Paceline."""
    return [one.detach().clone() for one in usage(Loop())]


def check_usages(
    pool: Pool, text: str, usages: Sequence[Usage], tolerances: Mapping[Usage, float] | None = None
) -> None:
    """Fail if a usage has another result on a rank than in one process; `tolerances` are those of lower precision."""
    names = [(usage.__module__, usage.__name__) for usage in usages]
    answers = pool.run(run_usages, RANKS, text, names)
    for usage in usages:
        expected, tolerance = run_alone(usage), (tolerances or {}).get(usage, TOLERANCE)
        for rank, found in enumerate(answers):
            result = found.get(usage.__name__, "not run, because an earlier usage failed")
            if isinstance(result, str):
                pytest.fail(f"{usage.__name__} under {text} on rank {rank}: {result}")
            torch.testing.assert_close(
                result,
                expected,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, name=usage.__name__, rank=rank: f"{name} under {text} on rank {rank}: {m}",
            )


def usage_tests(
    usages: Sequence[Usage], turn: int, *, without_synchronisation: Sequence[Usage] | None = None, **options: Any
) -> tuple[Callable[[Pool, str], None], Callable[[Pool], None]]:
    """Return a test that usages have the results of one process, and one that they have others without synchronisation.

    `turn` and options are those of `same_in_one_process`. The usages of the second test are given if they are others.
    """
    without = usages if without_synchronisation is None else without_synchronisation
    return same_in_one_process(usages, turn, **options), different_without_synchronisation(without)


def same_in_one_process(
    usages: Sequence[Usage],
    turn: int,
    *,
    strategies: Sequence[str] = STRATEGIES,
    tolerances: Mapping[Usage, float] | None = None,
) -> Callable[[Pool, str], None]:
    """Return a test of usages under each strategy; `turn` chooses those that the suite has, the soak has the others.

    The suite has one strategy of every other family: each usage meets half of the families, and each family the usages
    of half of the files.
    """
    now = one_of_each_family(strategies, turn // 2)[turn % 2 :: 2]

    @pytest.mark.parametrize(
        "text", [pytest.param(text, marks=() if text in now else pytest.mark.soak) for text in strategies]
    )
    def test(pool: Pool, text: str) -> None:
        check_usages(pool, text, usages, tolerances)

    return test


def different_without_synchronisation(usages: Sequence[Usage]) -> Callable[[Pool], None]:
    """Return a test that ranks which exchange nothing have other results: otherwise, a usage proves nothing."""

    def test(pool: Pool) -> None:
        names = [(usage.__module__, usage.__name__) for usage in usages]
        answer = pool.run(run_usages, RANKS, "none", names)[0]
        failed = [result for result in answer.values() if isinstance(result, str)]
        assert not failed, failed[0]
        same = [usage.__name__ for usage in usages if _all_close(answer[usage.__name__], run_alone(usage))]
        assert not same, f"these have the same results without synchronisation: {same}"

    return test


def _all_close(found: Any, expected: Sequence[Tensor]) -> bool:
    return all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))
