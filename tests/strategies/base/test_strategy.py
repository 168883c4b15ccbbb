"""The strategy interface on real ranks: clean-up, agreed weights, save and load, unused parameters, odd gradients."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm import Comm, close_comm, open_comm
from paceline.comm.shared_memory.host_memory import MEMFD_NAME
from paceline.errors import WorkloadError
from paceline.strategies.base import strategy as strategy_module
from paceline.strategies.base.strategy import AfterBackward, Role, Strategy
from paceline.strategies.registry import ENTRIES, create
from paceline.training.sync import Sync
from ranks import Pool, RankFailed, release_in_background, wait_for_released_groups
from registered import EXCHANGING, LOSSLESS, with_options

pytestmark = pytest.mark.takes(15)

SMALL = {"halving_doubling": "segment_kb=0.5", "parameter_server": "servers=2"}
ALL = [
    *[name for name, entry in ENTRIES.items() if entry.role == "bound"],
    *with_options(EXCHANGING, SMALL),
    "ddp:overlap=false",
]
AFTER_BACKWARD = [name for name in ENTRIES if isinstance(create(name), AfterBackward)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(sync: Sync, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(1000 * sync.rank + step)
        sync.model(torch.randn(4, 6)).square().mean().backward()
        sync.step()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 3))


def train_with_all(comm: Comm) -> list[str]:
    """Train with every strategy in turn, three times; return descriptions of resources that were not released."""
    close_comm(comm)
    wait_for_released_groups()
    left: list[str] = []
    before: dict[str, Any] = {}
    for _ in range(3):
        for text in (*ALL, "parameter_server:servers=2,asynchronous=true"):
            ours = open_comm(range(dist.get_world_size()), device=comm.device, backend="gloo", timeout_s=30)
            assert ours is not None
            model = make_model()
            sync = Sync(model, sgd, create(text), ours, "sync" if text == "allreduce" else "broadcast")
            train(sync, 3)
            sync.close()
            left += [*hooks_on(model, text), *shared_memory(text)]
            held = [ours]
            del sync, model, ours
            release_in_background(held)
        gc.collect()
        wait_for_released_groups()
        now = {
            "groups": len(dist.distributed_c10d._world.pg_map),
            "python threads": threading.active_count(),
            "threads": settled_threads(),
            "tensors": sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
        }
        left = [*left, *[f"{key}: {before[key]} then {now[key]}" for key in before if now[key] != before[key]]]
        left = left if before else []
        before = now
    dist.barrier()
    return left


def settled_threads() -> int:
    """Return the threads of this process, once their number has not changed for a while: native ones end late."""
    count, since_s, end_s = 0, 0.0, time.monotonic() + 10
    while time.monotonic() < end_s:
        found = psutil.Process().num_threads()
        if found != count:
            count, since_s = found, time.monotonic()
        elif time.monotonic() - since_s > 0.3:
            break
        time.sleep(0.02)
    return count


def hooks_on(model: nn.Module, text: str) -> list[str]:
    found = [
        f"{text}: a hook on {name}" for name, m in model.named_modules() if m._forward_pre_hooks or m._forward_hooks
    ]
    found += [f"{text}: a {type(m).__name__}" for m in model.modules() if type(m).__module__.startswith("paceline")]
    # A backward pass on one rank only must not wait for other ranks.
    if dist.get_rank() == 0:
        model(torch.randn(4, 6)).sum().backward()
    return found


def shared_memory(text: str) -> list[str]:
    """Return the shared memory that this process still maps; it has no name in the file system."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [f"{text}: shared memory {line}" for line in lines if f"memfd:{MEMFD_NAME}" in line]


def test_strategies_release_all_resources(pool: Pool) -> None:
    assert pool.run(train_with_all, 4) == [[]] * 4


def agreed_weights(comm: Comm, text: str) -> tuple[Tensor, Tensor, Tensor]:
    model = make_model()
    sync = Sync(model, sgd, create(text), comm, "local")
    train(sync, 3)
    sync.strategy.finish()
    own = weights(model)
    with sync.agreed() as shipped:
        agreed = weights(shipped)
    after = weights(model)
    sync.close()
    return own, agreed, after


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in [*model.parameters(), model[2].running_mean]])


@pytest.mark.parametrize("text", ALL)
def test_agreed_weights_are_the_same_on_every_rank(pool: Pool, text: str) -> None:
    answers = pool.run(agreed_weights, 3, text)
    for own, agreed, after in answers:
        assert torch.equal(agreed, answers[0][0])
        assert torch.equal(own, after)
    drifted = not torch.equal(answers[0][0][:-64], answers[1][0][:-64])
    assert drifted == (not create(text).exchanges)


def save_and_continue(comm: Comm, text: str, other: str) -> tuple[Tensor, Tensor]:
    """Return the weights after six steps, and after three, a save, a load with another strategy and three more."""
    straight = make_model()
    sync = Sync(straight, sgd, create(text), comm, "broadcast")
    train(sync, 3)
    state = sync.strategy.state().copy()
    train(sync, 3)
    sync.detach()
    resumed = make_model()
    again = Sync(resumed, sgd, create(other), comm, "broadcast")
    assert again.strategy.load(state) == []
    train(again, 3)
    again.close()
    return weights(straight), weights(resumed)


SAVED = with_options(LOSSLESS, SMALL)


@pytest.mark.parametrize(
    ("text", "other"),
    [*itertools.pairwise([*SAVED, SAVED[0]]), ("ddp", "ddp"), ("allreduce", SAVED[-1]), ("priority", "bucketed")],
)
def test_training_continues_from_a_saved_state(pool: Pool, text: str, other: str) -> None:
    for straight, resumed in pool.run(save_and_continue, 2, text, other):
        torch.testing.assert_close(resumed, straight)


class Branching(nn.Module):
    """Model with one layer that only even ranks use, and one that no rank uses."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        """Apply one or two layers."""
        return self.always(x) + self.sometimes(x) if self.used else self.always(x)


def train_branching(comm: Comm, text: str, allow_unused: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the weights of the used layers, of the unused layer, and of the unused layer before training."""
    torch.manual_seed(0)
    model = Branching(used=comm.rank % 2 == 0)
    never = [parameter.detach().clone() for parameter in model.never.parameters()]
    sync = Sync(model, sgd, create(text, allow_unused=allow_unused), comm, "local")
    train(sync, 3)
    sync.close()
    used = [parameter.detach() for layer in (model.always, model.sometimes) for parameter in layer.parameters()]
    return used, [parameter.detach() for parameter in model.never.parameters()], never


@pytest.fixture(scope="module")
def weights_of_used_layers(pool: Pool) -> list[Tensor]:
    used: list[Tensor] = pool.run(train_branching, 3, "allreduce", True)[0][0]
    return used


@pytest.mark.parametrize("text", LOSSLESS)
def test_unused_parameters_if_allowed(pool: Pool, weights_of_used_layers: list[Tensor], text: str) -> None:
    for used, never, untouched in pool.run(train_branching, 3, text, True):
        torch.testing.assert_close(used, weights_of_used_layers)
        torch.testing.assert_close(never, untouched, rtol=0, atol=0)


def test_unused_parameters_are_named(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"2 parameters got no gradient on rank 0: never.weight, never.bias"):
        pool.run(named_unused, 2)


def named_unused(comm: Comm) -> None:
    model = Branching(used=True)
    sync = Sync(model, sgd, create("allreduce"), comm, "local")
    train(sync, 1)


def without_flat_views(comm: Comm, text: str) -> tuple[list[Tensor], str]:
    """Train on one rank, which sends nothing, so its gradients stay as they are; then leave parameters unused."""
    torch.manual_seed(0)
    model = Branching(used=True)
    sync = Sync(model, sgd, create(text, allow_unused=True), comm, "local")
    with patch.object(strategy_module, "flat_view", side_effect=AssertionError("a view is made")):
        train(sync, 2)
    sync.strategy.allow_unused = False
    with pytest.raises(WorkloadError) as caught:
        train(sync, 1)
    sync.detach()
    return [parameter.detach() for parameter in model.parameters()], caught.value.message


@pytest.mark.parametrize("text", AFTER_BACKWARD)
def test_one_rank_only_checks_its_gradients(pool: Pool, text: str) -> None:
    ((weights, message),) = pool.run(without_flat_views, 1, text)
    torch.manual_seed(0)
    model = Branching(used=True)
    optimizer = sgd(model.parameters())
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(weights, [parameter.detach() for parameter in model.parameters()])
    assert message == "2 parameters got no gradient on rank 0: never.weight, never.bias."


def sparse(comm: Comm) -> str:
    model = nn.Embedding(5, 2, sparse=True)
    sync = Sync(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), create("allreduce"), comm, "local")
    sync.model(torch.tensor([1])).sum().backward()
    try:
        sync.step()
    except WorkloadError as error:
        return error.message
    finally:
        sync.detach()
    return "no error"


def test_a_sparse_gradient_is_refused_by_name(pool: Pool) -> None:
    assert pool.run(sparse, 2) == ["the gradient of weight is sparse; strategies send only dense gradients."] * 2


def channels_last(comm: Comm, text: str) -> tuple[bool, Tensor]:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    sync = Sync(model, sgd, create(text), comm, "local")
    torch.manual_seed(comm.rank)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    sync.model(x).square().mean().backward()
    strided = model.weight.grad is not None and not model.weight.grad.is_contiguous()
    sync.step()
    sync.close()
    return strided, model.weight.detach().contiguous()


def test_channels_last_gradients(pool: Pool) -> None:
    found = {text: pool.run(channels_last, 3, text)[1] for text in LOSSLESS}
    assert found["allreduce"][0], "the gradient under test is not channels-last"
    for _, weight in found.values():
        torch.testing.assert_close(weight, found["ddp"][1])


def test_roles() -> None:
    for name, entry in ENTRIES.items():
        roles = create(name).roles(4)
        expected = [Role.WORKER] + [Role.IDLE] * 3 if entry.one_process else [Role.WORKER] * 4
        assert roles == expected


def frozen_model(comm: Comm) -> str:
    model = nn.Linear(2, 2).requires_grad_(False)
    try:
        Sync(model, sgd, create("allreduce"), comm, "local")
    except WorkloadError as error:
        return error.message
    return "no error"


def test_a_model_without_trainable_parameters_is_refused(pool: Pool) -> None:
    assert pool.run(frozen_model, 1) == ["the model has no parameter with requires_grad=True."]


def left_out(comm: Comm) -> list[float]:
    """Return the gradient norm, in each step, of a layer that the optimiser does not have."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    only_first = lambda parameters: torch.optim.SGD([p for p in parameters if p[0].startswith("0")], lr=0.0)  # noqa: E731
    sync = Sync(model, only_first, create("allreduce"), comm, "local")
    norms = []
    for _ in range(3):
        torch.manual_seed(comm.rank)
        sync.model(torch.randn(4, 6)).square().mean().backward()
        norms.append(float(model[1].weight.grad.norm()))
        sync.step()
    sync.close()
    return norms


def test_gradients_outside_the_optimiser_do_not_accumulate(pool: Pool) -> None:
    for first, *later in pool.run(left_out, 2):
        assert later == [pytest.approx(first)] * 2


def odd_buffers(comm: Comm) -> list[Tensor]:
    model = nn.Linear(2, 2)
    for dtype in (torch.int16, torch.bool, torch.bfloat16):
        model.register_buffer(f"of_{dtype}".replace(".", "_"), torch.full((3,), comm.rank).to(dtype))
    Sync(model, sgd, create("allreduce"), comm, "local").close()
    return [buffer.float() for buffer in model.buffers()]


def test_buffers_of_any_type_are_copied_from_rank_0(pool: Pool) -> None:
    for buffers in pool.run(odd_buffers, 2):
        assert all(torch.equal(buffer, torch.zeros(3)) for buffer in buffers)


def buffers_of_none(comm: Comm) -> Tensor:
    model = make_model()
    sync = Sync(model, sgd, create("none"), comm, "broadcast")
    train(sync, 3)
    sync.close()
    return model[2].running_mean


def test_none_does_not_exchange_buffers_either(pool: Pool) -> None:
    together = pool.run(buffers_of_none, 2)
    (alone,) = pool.run(buffers_of_none, 1)
    assert torch.equal(together[0], alone)
    assert not torch.equal(together[1], alone)


class LargeGradients(nn.Module):
    """Model with gradients of 40,000 in several dtypes; in float16 the sum over two ranks is not finite."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
            self.register_parameter(name, nn.Parameter(torch.zeros(300, dtype=dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return sum((parameter.float() * x).sum() for parameter in self.parameters())


def step_with_large_gradients(comm: Comm, strategy: str) -> dict[str, Tensor]:
    """Return the weights after one step with learning rate 1: the negative mean gradient."""
    model = LargeGradients()
    with Sync(model, lambda named: torch.optim.SGD(named, lr=1.0), create(strategy), comm, "local") as sync:
        sync.model(torch.full((300,), 40_000.0)).backward()
        sync.step()
        with sync.agreed() as agreed:
            return {name: weights.detach().float() for name, weights in agreed.named_parameters()}


@pytest.mark.parametrize("strategy", [*LOSSLESS, "ddp:overlap=false"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_means_of_large_half_precision_gradients_are_finite(pool: Pool, strategy: str, ranks: int) -> None:
    for weights in pool.run(step_with_large_gradients, ranks, strategy):
        for name, found in weights.items():
            torch.testing.assert_close(
                -found, torch.full((300,), 40_000.0), rtol=2e-2 if name == "bf16" else 1e-3, atol=0
            )


INTERFACE = {
    *("name", "lossless", "lockstep", "exchanges", "sends", "agrees_in_backward", "supports", "period", "Options"),
    "on_mean",
    *("roles", "attach", "wrap", "microbatch", "step", "finish", "agreed", "state", "load", "close", "abandon"),
}
FOR_SUBCLASSES = {"model", "comm", "parameters", "optimizer", "gradients"} | {"update", "apply_update", "report_mean"}


def test_the_interface_stays_small() -> None:
    """An ability that few strategies have belongs into abilities.py."""
    names = {name for name in {*vars(Strategy), *Strategy.__annotations__} if not name.startswith("_")}
    assert names == INTERFACE | FOR_SUBCLASSES
    set_on_one = {name for name in vars(create("allreduce")) if not name.startswith("_")}
    assert set_on_one == {"options", "allow_unused", "replay_update"}


def load_partly(comm: Comm) -> tuple[list[str], bool, bool]:
    """Return what was not used of a state, and whether states are the run's own and copies are not."""
    sync = Sync(make_model(), sgd, create("allreduce"), comm, "local")
    train(sync, 2)
    state = sync.strategy.state()
    kept = state.copy()
    name, parameter = next(iter(sync.strategy.parameters))
    is_own = state.optimizer[name]["momentum_buffer"] is sync.optimizer.state[parameter]["momentum_buffer"]
    train(sync, 1)
    is_kept = not torch.equal(kept.model[name], state.model[name])
    kept.optimizer["frozen.weight"] = {"momentum_buffer": torch.ones(1)}
    kept.per_rank["error feedback"] = torch.ones(1)
    unused = sync.strategy.load(kept)
    assert torch.equal(parameter.detach(), kept.model[name])
    sync.close()
    return unused, is_own, is_kept


def test_what_was_not_loaded_is_named(pool: Pool) -> None:
    unused = ["the optimiser's state of frozen.weight, which is not trained", "error feedback of another strategy"]
    assert pool.run(load_partly, 1) == [(unused, True, True)]
