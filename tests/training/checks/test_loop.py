"""Misuse of an attached model is refused in one sentence, under every strategy; correct loops are not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module
from torch.utils.checkpoint import checkpoint

from paceline.comm import Comm
from paceline.errors import WorkloadError
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.registry import ENTRIES, create
from paceline.training.checks.loop import check_not_attached
from paceline.training.sync import Sync
from ranks import Pool
from registered import EXCHANGING, one_of_each_family

pytestmark = pytest.mark.takes(10)

ASYNCHRONOUS = "parameter_server:asynchronous=true"
STRATEGIES = [*[name for name, entry in ENTRIES.items() if entry.role == "bound"], *EXCHANGING, ASYNCHRONOUS]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def inputs(sync: Sync) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(sync.rank))


def backward(sync: Sync) -> None:
    sync.model(inputs(sync).to(next(sync.strategy.model.parameters()).dtype)).square().mean().backward()


def train(sync: Sync, steps: int = 2) -> None:
    for _ in range(steps):
        backward(sync)
        sync.step()
    sync.comm.control.barrier()  # Where ranks do not wait for each other, one would receive another's failure.


def messages(comm: Comm, case: Callable[[Sync, nn.Sequential], None], text: str, **settings: Any) -> str:
    """Train two steps, then call `case`; return the message of the WorkloadError that it raises."""
    model = make_model()
    try:
        with Sync(model, sgd, create(text, **settings), comm, "local") as sync:
            train(sync)
            case(sync, model)
    except WorkloadError as error:
        return error.message if error.hint else "no hint"
    return "no error"


def unfreezes(sync: Sync, model: nn.Sequential) -> None:
    model[0].requires_grad_(True)
    train(sync, 1)


def freezes(sync: Sync, model: nn.Sequential) -> None:
    model[2].bias.requires_grad_(False)
    train(sync, 1)


def adds(sync: Sync, model: nn.Sequential) -> None:
    train(sync, 4)  # The next search of all modules is after step 8.
    model.append(nn.Linear(3, 3))
    train(sync, 1)


def replaces(sync: Sync, model: nn.Sequential) -> None:
    train(sync, 4)
    model[4] = nn.Linear(8, 3)
    train(sync, 1)


def removes(sync: Sync, model: nn.Sequential) -> None:
    train(sync, 4)
    model[2] = nn.Identity()
    train(sync, 1)


def removes_unnoticed(sync: Sync, model: nn.Sequential) -> None:
    train(sync, 4)
    del model[2:4]
    train(sync, 1)


def loads_by_assignment(sync: Sync, model: nn.Sequential) -> None:
    with sync.agreed():
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    train(sync, 1)


def steps_the_optimizer(sync: Sync, _: nn.Sequential) -> None:
    backward(sync)
    sync.optimizer.step()


def scales_and_steps(sync: Sync, _: nn.Sequential) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(sync.model(inputs(sync)).square().mean()).backward()
    scaler.step(sync.optimizer)


def steps_another(sync: Sync, model: nn.Sequential) -> None:
    optimizer = torch.optim.Adam(model[2].parameters())
    backward(sync)
    optimizer.step()


def adds_a_group(sync: Sync, _: nn.Sequential) -> None:
    sync.optimizer.add_param_group({"params": [("scale", nn.Parameter(torch.ones(3)))]})
    train(sync, 1)


CASES: dict[Callable[[Sync, nn.Sequential], None], str] = {
    unfreezes: "0.weight was unfrozen after attach(), so it is not synchronised.",
    freezes: "2.bias was frozen after attach().",
    adds: "5.weight was added to the model after attach(), so it is not synchronised.",
    replaces: "4.weight was replaced by another parameter after attach().",
    removes: "2.weight was removed from the model after attach().",
    loads_by_assignment: "2.weight was replaced by another parameter after attach().",
    steps_the_optimizer: "the optimiser was stepped without sync.step().",
    scales_and_steps: "the optimiser was stepped without sync.step().",
    steps_another: "an optimiser that attach() did not receive, Adam, steps 2.weight.",
    adds_a_group: "SGD has 1 parameter that make_optimizer did not receive (the first has the shape 3), so no strategy "
    "synchronises them.",
}


def cases_and_strategies() -> Iterator[Any]:
    """Yield each case with one strategy of each family, another with each case, and with all of them in the soak."""
    for turn, case in enumerate(CASES):
        strategies = EXCHANGING if case is freezes else STRATEGIES  # `none` trains the others, which is right.
        yield pytest.param(case, one_of_each_family(strategies, turn), id=case.__name__)
        yield pytest.param(case, strategies, marks=pytest.mark.soak, id=f"{case.__name__} with all")


@pytest.mark.parametrize(("case", "strategies"), list(cases_and_strategies()))
def test_misuse_is_refused_under_every_strategy(
    pool: Pool, case: Callable[[Sync, nn.Sequential], None], strategies: list[str]
) -> None:
    found = {(text, ranks): pool.run(messages, ranks, case, text) for text in strategies for ranks in (1, 2)}
    assert found == {(text, ranks): [CASES[case]] * ranks for text, ranks in found}


def converts(sync: Sync, model: nn.Sequential) -> None:
    model.double()
    train(sync, 1)


def test_another_dtype_is_refused(pool: Pool) -> None:
    found = pool.run(messages, 2, converts, "allreduce")
    before, now = (f"torch.float{bits} on cpu with the shape (8, 8)" for bits in (32, 64))
    assert found == [f"2.weight was {before} at attach(), and is now {now}."] * 2


# Freezing where parameters may be unused.


def freeze_and_train(comm: Comm, text: str) -> list[Tensor]:
    model = make_model()
    with Sync(model, sgd, create(text, allow_unused=True), comm, "local") as sync:
        train(sync)
        model[2].bias.requires_grad_(False)
        train(sync, 3)
        model[2].bias.requires_grad_(True)
        train(sync)
    return [parameter.detach() for parameter in model.parameters()]


def test_parameters_can_be_frozen_for_some_steps_if_unused_ones_are_allowed(pool: Pool) -> None:
    expected, _ = pool.run(freeze_and_train, 2, "allreduce")
    for text in EXCHANGING:
        for found in pool.run(freeze_and_train, 2, text):
            torch.testing.assert_close(found, expected, msg=text)


def misses_a_gradient(sync: Sync, model: nn.Sequential) -> None:
    sync.model(inputs(sync))
    F.linear(inputs(sync), model[2].weight[:, :6]).sum().backward()
    sync.step()


def test_a_removed_parameter_is_named_where_its_gradient_is_missing(pool: Pool) -> None:
    for text in EXCHANGING:
        assert pool.run(messages, 2, removes_unnoticed, text) == [CASES[removes]] * 2


@pytest.mark.parametrize("text", EXCHANGING)
def test_a_missing_gradient_is_named_in_its_step(pool: Pool, text: str) -> None:
    for rank, message in enumerate(pool.run(messages, 2, misses_a_gradient, text)):
        assert message == f"3 parameters got no gradient on rank {rank}: 2.bias, 4.weight, 4.bias."


# Calls of the model itself.

ONLY_THIS = "; ddp synchronises only gradients that come from sync.model."
CALLED = f"the model itself was called in training{ONLY_THIS}"
NOT_CALLED = f"this step has gradients, and sync.model was not called{ONLY_THIS}"


def calls_the_model(sync: Sync, model: nn.Sequential) -> None:
    model(inputs(sync)).square().mean().backward()
    sync.step()


def calls_the_module(sync: Sync, _: nn.Sequential) -> None:
    sync.model.module(inputs(sync)).square().mean().backward()


def calls_the_model_in_eval_mode(sync: Sync, model: nn.Sequential) -> None:
    model.eval()(inputs(sync)).square().mean().backward()
    sync.step()


def calls_parts(sync: Sync, model: nn.Sequential) -> None:
    model[4](model[2](model[0](inputs(sync)))).square().mean().backward()
    sync.step()


def calls_after_an_error(sync: Sync, model: nn.Sequential) -> None:
    with pytest.raises(RuntimeError):
        sync.model(torch.ones(2, 3))
    model(inputs(sync))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (calls_the_model, CALLED),
        (calls_the_module, CALLED),
        (calls_the_model_in_eval_mode, NOT_CALLED),
        (calls_parts, NOT_CALLED),
        (calls_after_an_error, CALLED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_calls_that_bypass_the_wrapped_model(
    pool: Pool, case: Callable[[Sync, nn.Sequential], None], expected: str
) -> None:
    assert pool.run(messages, 2, case, "ddp") == [expected] * 2
    assert pool.run(messages, 1, case, "ddp") == [expected]


class Checkpointed(nn.Module):
    """Model that computes a layer again in backward."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, nested: bool = False) -> Tensor:
        """Apply the layers."""
        if nested:
            x = x + self(x)[:, :1]
        return checkpoint(self.layers, x, use_reentrant=False)


def right_calls(comm: Comm, text: str) -> list[Tensor]:
    """Use the model in every permitted way; return the weights."""
    model = Checkpointed(make_model())
    with Sync(model, sgd, create(text), comm, "local") as sync:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(sync.optimizer, 0.9)
        sync.optimizer.step()  # Without gradients, as a scheduler's warm-up does.
        for step in range(4):
            x = inputs(sync) + step
            with sync.accumulate():
                sync.model(x).square().mean().backward()
            (sync.model(x).square() + sync.model(x, nested=True)).mean().backward()  # Twice, and in itself.
            with pytest.raises(RuntimeError):
                sync.model(torch.ones(2, 3))
            with torch.no_grad():
                model(x)
            with torch.inference_mode():
                model(x)
            model.eval()
            model(x)
            model.train()
            sync.step()
            scheduler.step()
            with sync.agreed() as agreed:
                agreed(x)
            sync.model.eval()
            with torch.no_grad():
                sync.model(x)
            sync.model.train()
        sync.model.requires_grad_(False)
        model(inputs(sync).requires_grad_()).sum().backward()  # As the discriminator of a GAN.
        model.requires_grad_(True)
        model.layers[0].requires_grad_(False)
        checkpoint(sync.model, inputs(sync), use_reentrant=False).sum().backward()
        sync.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_permitted_calls(pool: Pool) -> None:
    expected, _ = pool.run(right_calls, 2, "allreduce")
    for found in pool.run(right_calls, 2, "ddp"):
        torch.testing.assert_close(found, expected)
    pool.run(right_calls, 1, "ddp")
    pool.run(right_calls, 2, "none")


def compiled(comm: Comm, when: str) -> list[Tensor]:
    """Train a compiled model; return the weights. The compiler traces the hooks, if it is called after attach."""
    model: nn.Module = make_model()
    # Only what torch.compile captures is of interest, and not the code that it would generate.
    compile_model: Any = lambda module: torch.compile(module, backend="eager")  # noqa: E731
    attached = compile_model(model) if when == "before" else model
    with Sync(attached, sgd, create("ddp"), comm, "local") as sync:
        called = compile_model(sync.model) if when == "after" else sync.model
        if when == "in place":
            model.compile(backend="eager")
        for _ in range(3):
            called(inputs(sync)).square().mean().backward()
            sync.step()
        message = "no error"
        try:
            attached(inputs(sync)).square().mean().backward()
            sync.step()
        except WorkloadError as error:
            message = error.message
        assert message == (NOT_CALLED if when == "in place" else CALLED)
    return [parameter.detach() for parameter in model.parameters()]


def plain(comm: Comm) -> list[Tensor]:
    model = make_model()
    with Sync(model, sgd, create("ddp"), comm, "local") as sync:
        train(sync, 3)
    return [parameter.detach() for parameter in model.parameters()]


def test_compiled_models(pool: Pool) -> None:
    expected, _ = pool.run(plain, 2)
    for when in ("before", "after", "in place"):
        for found in pool.run(compiled, 2, when):
            torch.testing.assert_close(found, expected, msg=when)


# Optimisers.


class UpdatesLater(AllReduce):
    """Strategy of a user that steps the optimiser outside `step`: in `finish`, and in a hook of backward."""

    name: ClassVar[str] = "updates_later"

    def wrap(self, model: nn.Module) -> nn.Module:
        self._due = False
        (_, last) = self.parameters[-1]
        last.register_hook(lambda gradient: (self._finish_before(), gradient)[1])
        return super().wrap(model)

    def update(self, max_norm: float | None, scaler: Any = None) -> None:  # noqa: ARG002
        self._due = True

    def finish(self) -> None:
        if self._due:
            self._due = False
            super().update(None)

    def _finish_before(self) -> None:
        self.finish()


def finishes_later(comm: Comm) -> None:
    with Sync(make_model(), sgd, create(f"{__name__}:UpdatesLater"), comm, "local") as sync:
        train(sync, 3)
        with sync.agreed():
            pass


def test_a_strategy_may_step_outside_of_step(pool: Pool) -> None:
    pool.run(finishes_later, 2)


class Wrapping(torch.optim.Optimizer):
    """Optimiser that steps another one, as Lookahead does."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__([p for _, p in parameters], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Step the other optimiser."""
        self.inner.step()


def wraps(comm: Comm, text: str) -> None:
    with Sync(make_model(), Wrapping, create(text), comm, "local") as sync:
        train(sync, 3)


def test_an_optimiser_may_call_another_one(pool: Pool) -> None:
    for text in ("allreduce", "priority", "ddp"):
        pool.run(wraps, 2, text)


def two_live(comm: Comm) -> list[Tensor]:
    """Train two models in turn, as in a GAN; return the weights of the first."""
    first, second = make_model(), make_model()
    with (
        Sync(first, sgd, create("ddp"), comm, "local") as one,
        Sync(second, sgd, create("allreduce"), comm, "local") as two,
    ):
        for _ in range(3):
            train(one, 1)
            train(two, 1)
    return [parameter.detach() for parameter in first.parameters()]


def test_two_attached_models(pool: Pool) -> None:
    for found in pool.run(two_live, 2):
        torch.testing.assert_close(found, pool.run(plain, 2)[0])


def makes(comm: Comm, make: Callable[[Any], Any], text: str) -> str:
    try:
        Sync(make_model(), make, create(text), comm, "sync")
    except WorkloadError as error:
        return error.message if error.hint else "no hint"
    return "no error"


def nothing(_: Any) -> None:
    """Return nothing, as a function does that lacks its return statement."""


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for _, p in parameters])


def of_another_model(_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(make_model().parameters(), lr=0.1)


def with_loss_weights(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*[p for _, p in parameters], nn.Parameter(torch.tensor(1.0))], lr=0.1)


def test_what_make_optimizer_returns(pool: Pool) -> None:
    assert pool.run(makes, 1, nothing, "ddp") == ["make_optimizer returned None, not an optimiser."]
    assert pool.run(makes, 1, lbfgs, "ddp") == [
        "LBFGS cannot be used: its step() needs the argument 'closure', and strategies step an optimiser once per "
        "synchronised gradient."
    ]
    for make, count, shape in (
        (of_another_model, "6 parameters", "8×6"),
        (with_loss_weights, "1 parameter", "a single value"),
    ):
        assert pool.run(makes, 1, make, "allreduce") == [
            f"SGD has {count} that make_optimizer did not receive (the first has the shape {shape}), so no strategy "
            "synchronises them."
        ]


def same_for_all(comm: Comm) -> str:
    model = make_model()
    made = torch.optim.SGD(model.parameters(), lr=0.1)  # With the frozen parameters, which is permitted.
    with Sync(model, lambda _: made, create("allreduce"), comm, "local") as sync:
        train(sync)
    try:
        Sync(model, lambda _: made, create(ASYNCHRONOUS), comm, "local")
    except WorkloadError as error:
        return error.message
    return "no error"


def test_an_asynchronous_server_needs_an_optimiser_of_its_own(pool: Pool) -> None:
    (found,) = pool.run(same_for_all, 1)
    assert found.startswith("SGD has 4 parameters that make_optimizer did not receive")


# Buffers of a loop that calls only parts of the model.


def train_parts(comm: Comm, whole: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    with Sync(model, sgd, create("allreduce"), comm, "broadcast") as sync:
        seen = []
        for step in range(4):
            x = inputs(sync) + step
            seen.append(model[1].running_mean.clone())
            (model(x) if whole else model[1](model[0](x))).square().mean().backward()
            sync.step()
    return seen


def test_buffers_are_broadcast_if_only_parts_of_the_model_are_called(pool: Pool) -> None:
    first, second = pool.run(train_parts, 2, False)
    torch.testing.assert_close(second, first)
    torch.testing.assert_close(first, pool.run(train_parts, 2, True)[0])


def fails_late(comm: Comm, text: str) -> list[int]:
    """Attach while the last part of it fails; return the hooks that are left, then attach and train again."""
    model = make_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.training.sync.UpdatedBuffers", raise_memory_error)
        with pytest.raises(MemoryError):
            Sync(model, sgd, create(text), comm, "local")
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    hooks += [len(module._forward_pre_hooks) for module in model.modules()]
    check_not_attached(model)
    with Sync(model, sgd, create(text), comm, "local") as sync:
        train(sync)
    return hooks


def raise_memory_error(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("text", STRATEGIES)
def test_an_attach_that_fails_leaves_the_model_as_it_was(pool: Pool, text: str) -> None:
    for hooks in pool.run(fails_late, 2, text):
        assert not any(hooks)


def attach_beside_a_thread(comm: Comm) -> list[str]:
    """Attach and close while a thread steps another optimiser; return what went wrong."""
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    errors: list[str] = []
    is_done = threading.Event()

    def step() -> None:
        while not is_done.is_set():
            try:
                other.step()
            except RuntimeError as error:
                errors.append(str(error))
                return

    thread = threading.Thread(target=step)
    for number in range(20):
        sync = Sync(make_model(), sgd, create("allreduce"), comm, "broadcast")
        if not number:
            hooks = dict(optimizer_module._global_optimizer_pre_hooks)
            thread.start()
        elif hooks != optimizer_module._global_optimizer_pre_hooks:
            errors.append("the hooks of all optimisers have changed")
        sync.detach()
    is_done.set()
    thread.join()
    return errors


def test_attaching_and_closing_does_not_disturb_optimisers_in_other_threads(pool: Pool) -> None:
    """Servers step in threads. Torch's hooks on all optimisers, which are in one dict, must not change meanwhile."""
    assert pool.run(attach_beside_a_thread, 2) == [[], []]
