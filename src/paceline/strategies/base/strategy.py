"""The strategy interface, with defaults that let a simple strategy consist of one method."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm.group import Comm, broadcast_from_rank_0
from paceline.comm.messages.flat_view import flat_view
from paceline.comm.messages.tensor_layout import check_same_model
from paceline.errors import UsageError, WorkloadError
from paceline.formatting import plural
from paceline.records.timeline import Purpose
from paceline.strategies.base.optimizer_state import clone_tensors, load_optimizer_state
from paceline.strategies.base.scaling import scaler_argument, unscale

NamedParameters = Sequence[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[NamedParameters], torch.optim.Optimizer]
OnMean = Callable[[Sequence[Tensor]], None]
SendMode = Literal["singly", "packed", "overlapped", "overlapped_forward"]


class Role(enum.Enum):
    """Task of a rank in a run."""

    WORKER = "worker"
    SERVER = "server"
    IDLE = "idle"


@dataclass(frozen=True)
class NoOptions:
    """Options of a strategy that has none."""


@dataclass
class State:
    """State of a run that a checkpoint keeps: whole tensors by name, independent of strategy and world size."""

    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    """State of the optimiser by parameter name."""
    per_rank: dict[str, Any] = field(default_factory=dict)
    """State of this rank only, such as the error feedback of a compression."""

    def copy(self) -> State:
        """Return a copy that later steps do not change; tensors that share their memory do so in the copy too."""
        return State(*clone_tensors([self.model, self.optimizer, self.per_rank]))


class Strategy(ABC):
    """Base class of all strategies. A strategy defines how ranks synchronise gradients.

    The training loop calls `attach` once. In each step it runs forward and backward of the returned module inside
    `microbatch(last)`, once for each micro-batch, then calls `step`. It evaluates inside `agreed`, and calls `close`
    at the end. Code outside `microbatch` counts as the last micro-batch, so a loop without gradient accumulation does
    not need it. Abilities that few strategies have are in `abilities.py`.
    """

    name: ClassVar[str]
    lossless: bool = True
    """Whether the gradient equals that of one process on the same batch, up to rounding."""
    lockstep: bool = True
    """Whether all ranks make each step together. If not, ranks do not wait for each other, and the strategy needs the
    ability `GivesTickets`."""
    exchanges: ClassVar[bool] = True
    """Whether ranks exchange data during training."""
    sends: ClassVar[SendMode] = "singly"
    """Way of sending gradients: each on its own, packed into few large messages, packed and during backward, or during
    backward and the next forward."""
    agrees_in_backward: ClassVar[bool] = False
    """Whether `backward()` of the last micro-batch returns with the mean over the ranks in `.grad`. If not, `step`
    averages what `.grad` holds by then, so changes between the two are made to this rank's own gradient."""
    supports: frozenset[str] = frozenset({"clip", "accumulate", "scaler"})
    """Supported features, out of {"clip", "accumulate", "scaler", "cuda_graph"}; checked before any process starts.

    "cuda_graph" means that `update` alone changes the weights, after a backward pass in which nothing is exchanged."""
    Options: ClassVar[type] = NoOptions
    """Dataclass of this strategy's options."""

    period: int = 1
    """Number of steps after which the traffic repeats."""
    on_mean: OnMean | None = None
    """Function of the run that gets the mean gradients of a step, unscaled and before clipping (see `report_mean`);
    None in steps whose gradients nobody needs."""

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else self.Options()
        self.allow_unused = False
        """Setting of the run, made before `attach`: whether a step may leave parameters without a gradient."""
        self.replay_update: Callable[[float | None], None] | None = None
        """Function of the loop that takes the place of `apply_update`: it replays a CUDA graph, which leaves the
        gradients where they are. None without such a graph."""
        self._attached: _Attachment | None = None

    # Methods that the training loop calls, in the order of the calls.

    def roles(self, world_size: int) -> list[Role]:
        """Return the role of each rank: first workers, then servers, then idle ranks."""
        return [Role.WORKER] * world_size

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Comm) -> nn.Module:
        """Copy rank 0's weights to every rank and prepare the model; return the module to call instead of it."""
        if not comm.is_server:  # Servers receive the weights from the strategy.
            check_same_model(model, comm.control)
            with comm.carrying(Purpose.WEIGHTS):
                broadcast_from_rank_0([*model.parameters(), *model.buffers()], comm)
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not parameters:
            raise WorkloadError("the model has no parameter with requires_grad=True.", hint="unfreeze some parameters")
        self._attached = _Attachment(model, comm, parameters, make_optimizer(parameters))
        return self.wrap(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call instead of the model: the model itself, unless the strategy wraps it."""
        return model

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context for forward and backward of one micro-batch; only the last of a step synchronises."""
        return nullcontext()

    @abstractmethod
    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        """Synchronise the gradients, unscale and clip them, step the optimiser and clear the gradients.

        Communication may still be in progress when it returns; `finish` waits for it.
        """

    def finish(self) -> None:  # noqa: B027  (most finish within `step`)
        """Wait for communication that `step` left in progress; called before the clock of a timed window stops."""

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        """Yield the model with the final weights of the run, the same on every rank."""
        self.finish()
        yield self.model

    def state(self) -> State:
        """Return the state that a checkpoint keeps, on every rank.

        Its tensors are those that are trained, so the next step changes them: copy it (`State.copy`) to keep it.
        """
        self.finish()
        names = {id(p): name for name, p in self.parameters}
        kept = {names[id(p)]: dict(values) for p, values in self.optimizer.state.items() if values}
        return State(model=dict(self.model.state_dict()), optimizer=kept)

    def load(self, state: State) -> list[str]:
        """Continue from a state of any world size or strategy; return a description of each part that was not used."""
        self.model.load_state_dict(state.model)
        load_optimizer_state(self.optimizer, self.parameters, state.optimizer)
        trained = {name for name, _ in self.parameters}
        untrained = [
            f"the optimiser's state of {name}, which is not trained" for name in state.optimizer.keys() - trained
        ]
        return [*sorted(untrained), *(f"{key} of another strategy" for key in state.per_rank)]

    def close(self) -> None:
        """Remove all hooks, and release threads, process groups and shared memory."""
        self._attached = None

    def abandon(self) -> None:
        """Close after an error on this rank, without waiting for other ranks: they may be waiting for this one."""
        self.close()

    # Properties and methods for subclasses.

    @property
    def model(self) -> nn.Module:
        """Model that was passed to `attach`."""
        return self._checked_attachment.model

    @property
    def comm(self) -> Comm:
        """Process groups and ranks of the run."""
        return self._checked_attachment.comm

    @property
    def parameters(self) -> NamedParameters:
        """Parameters with requires_grad=True, with their names, each once."""
        return self._checked_attachment.parameters

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimiser of this rank's parameters; learning-rate schedulers attach to it."""
        return self._checked_attachment.optimizer

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the last backward pass, each as a one-dimensional view; called on every rank.

        If unused parameters are allowed, a parameter that has a gradient on any rank gets one of zeros on the others.
        Otherwise a parameter without a gradient raises a WorkloadError.
        """
        self._check_all_used()
        if self.allow_unused:
            self._fill_unused()
        return [_flat_gradient(name, p) for name, p in self.parameters if p.grad is not None]

    def _check_all_used(self) -> None:
        """Raise a WorkloadError if a parameter has no gradient, unless unused parameters are allowed."""
        missing = [name for name, parameter in self.parameters if parameter.grad is None]
        if missing and not self.allow_unused:
            raise no_gradient_error(missing, self.comm.rank)

    def _fill_unused(self) -> None:
        """Set missing gradients to zero where another rank has one.

        A parameter without a gradient on all ranks stays without: otherwise momentum would change its weight.
        """
        used = self.comm.control.any_of(
            torch.tensor([p.grad is not None for _, p in self.parameters], dtype=torch.uint8)
        )
        for (_, parameter), anywhere in zip(self.parameters, used.tolist(), strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def update(self, max_norm: float | None, scaler: GradScaler | None = None) -> None:
        """Unscale and clip the synchronised gradients, step the optimiser and clear the gradients.

        After an overflow, which the scaler finds, all ranks skip the step: they only clear the gradients.
        """
        if self.replay_update is not None:
            self.replay_update(max_norm)
            return
        if scaler is None or not unscale(scaler, self):
            if self.on_mean is not None:
                self.report_mean([p.grad for _, p in self.parameters if p.grad is not None])
            self.apply_update(max_norm)
        for _, parameter in self.parameters:  # Also those that the user's optimiser does not have.
            parameter.grad = None

    def apply_update(self, max_norm: float | None) -> None:
        """Clip the gradients and step the optimiser."""
        if max_norm is not None:
            nn.utils.clip_grad_norm_([p for _, p in self.parameters], max_norm)
        self.optimizer.step()

    def report_mean(self, gradients: Sequence[Tensor]) -> None:
        """Pass mean gradients over the ranks to `on_mean`: all of a step, or parts of them one after the other.

        `update` calls it. A strategy that steps the optimiser in another way calls it before. All ranks have the same
        mean, so only rank 0 passes it on.
        """
        if self.on_mean is not None and self.comm.rank == 0 and gradients:
            self.on_mean(gradients)

    @property
    def _checked_attachment(self) -> _Attachment:
        if self._attached is None:
            raise UsageError(
                f"{self.name} was used before attach() or after close().", hint="call attach() first, and close() last"
            )
        return self._attached


def uses_one_rank(strategy: Strategy, world_size: int) -> bool:
    """Return whether only one rank trains and all others are idle, for any world size."""
    roles = strategy.roles(max(2, world_size))
    return roles.count(Role.IDLE) == len(roles) - 1


@dataclass(frozen=True)
class _Attachment:
    """Attributes of a strategy that exist between `attach` and `close`."""

    model: nn.Module
    comm: Comm
    parameters: NamedParameters
    optimizer: torch.optim.Optimizer


class AfterBackward(Strategy):
    """Base class of strategies that average the gradients after backward and before the optimiser.

    Subclasses write only `agree`.
    """

    supports = Strategy.supports | {"cuda_graph"}

    @abstractmethod
    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient, a one-dimensional tensor, with its mean over the ranks, in place."""

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        if self.comm.world_size == 1:
            self._check_all_used()
            for name, parameter in self.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise sparse_gradient_error(name)
        elif gradients := self.gradients():
            with torch.no_grad():  # backward(create_graph=True) makes gradients that require a gradient.
                self.agree(gradients)
        self.update(max_norm, **scaler_argument(scaler))


_ALLOW_UNUSED_HINT = (
    "remove them, or allow them with --allow-unused (in your own training loop: attach(…, allow_unused=True))"
)


def no_gradient_error(names: Sequence[str], rank: int) -> WorkloadError:
    """Return the error for parameters without a gradient; DDP's own error does not name them (pytorch#43259)."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    count = plural(len(names), "parameter")
    return WorkloadError(f"{count} got no gradient on rank {rank}: {shown}.", hint=_ALLOW_UNUSED_HINT)


def sparse_gradient_error(name: str) -> WorkloadError:
    """Return the error for a sparse gradient."""
    return WorkloadError(
        f"the gradient of {name} is sparse; strategies send only dense gradients.",
        hint="create the embedding with sparse=False",
    )


def _flat_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise sparse_gradient_error(name)
    if gradient.is_conj():
        parameter.grad = gradient = gradient.resolve_conj()
    flat = flat_view(gradient)
    if flat is None:  # The memory has holes. Autograd makes no such gradient, but a user's hook may.
        parameter.grad = gradient.contiguous()
        flat = parameter.grad.view(-1)
    # Gloo gathers no complex numbers.
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
