"""What every strategy is: the interface, and the defaults that make a simple scheme one method long."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from paceline.comm.flat_view import flat_view
from paceline.comm.group import Comm, broadcast_from_rank_0
from paceline.errors import UsageError, WorkloadError
from paceline.records.timeline import Purpose

NamedParameters = Sequence[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[NamedParameters], torch.optim.Optimizer]


class Role(enum.Enum):
    """What a rank does in a run."""

    WORKER = "worker"
    SERVER = "server"
    IDLE = "idle"


@dataclass(frozen=True)
class NoOptions:
    """A strategy that has nothing to choose."""


@dataclass
class State:
    """Everything a run needs to go on: whole tensors by name, whatever the strategy or the world size."""

    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    """Per parameter name, what the optimiser keeps for it."""
    per_rank: dict[str, Any] = field(default_factory=dict)
    """What only this rank knows, as the error feedback of a compression."""


class Strategy(ABC):
    """How ranks agree on gradients.

    The loop calls `attach` once; then, for each micro-batch of a step, forward and backward of the returned module
    inside `microbatch(last)`, then `step`; around evaluation `agreed`; in the end `close`. Code outside a `microbatch`
    counts as the last one, so that a loop without accumulation need not know of it.
    """

    name: ClassVar[str]
    lossless: bool = True
    """Gives the mean gradient that one process on the same batch would, up to rounding."""
    lockstep: bool = True
    """Whether ranks step together. Where they do not, none waits for another: `ticket` says what each trains next."""
    exchanges: ClassVar[bool] = True
    """Whether ranks exchange anything while they train."""
    travel: ClassVar[Literal["singly", "packed", "overlapped"]] = "singly"
    """How gradients travel: each in messages of its own, in few large ones, or in these while backward still runs."""
    supports: frozenset[str] = frozenset({"clip", "accumulate"})
    """Of {"clip", "accumulate", "cuda_graph"}; checked before any process starts."""
    Options: ClassVar[type] = NoOptions
    """The dataclass of this strategy's options."""

    period: int = 1
    """Steps until the traffic repeats."""
    allow_unused: bool = False
    """Whether parameters may get no gradient in a step."""
    updating: int | None = None
    """Where the optimiser is asked to step part by part: the number of the step that this part belongs to. None where
    each time that it is asked is a step."""

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else self.Options()
        self._attached: _Attached | None = None

    # The life of a strategy, in the order in which it happens.

    def roles(self, world_size: int) -> list[Role]:
        """What each rank does: those that train come first, then those that keep parameters, then idle ones."""
        return [Role.WORKER] * world_size

    def check_ranks(self, world_size: int) -> None:  # noqa: B027  (most go with any number)
        """Refuses so many ranks if it cannot do with them."""

    def is_alone(self, world_size: int) -> bool:
        """Whether one rank does everything, however many there are."""
        return self.roles(max(2, world_size)).count(Role.IDLE) == max(2, world_size) - 1

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Comm) -> nn.Module:
        """Gives every rank rank 0's weights and prepares the model; returns the module to call in its place."""
        if not comm.is_server:  # Those that keep parameters get them from the strategy.
            with comm.carrying(Purpose.WEIGHTS):
                broadcast_from_rank_0([*model.parameters(), *model.buffers()], comm)
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not parameters:
            raise WorkloadError("the model has no parameter that wants a gradient.", hint="unfreeze some of it")
        self._attached = _Attached(model, comm, parameters, make_optimizer(parameters))
        return self.wrap(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call instead of the model; the model itself, unless a scheme needs hooks around it."""
        return model

    def serve(self) -> None:  # noqa: B027  (most have no servers)
        """Servers stay here until the workers close."""

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Goes around forward and backward; ranks synchronise in the last one of a step only."""
        return nullcontext()

    @abstractmethod
    def step(self, max_norm: float | None = None) -> None:
        """Agrees on the gradients, clips, steps the optimiser and clears the gradients; may leave work in flight."""

    @property
    def ticket(self) -> int:
        """What this rank trains next, where ranks do not step together: the number of its step × ranks + of its share.

        Each number is given to one rank, in order.
        """
        raise UsageError(
            f"{self.name} gives no tickets: all ranks step together.",
            hint="each rank trains its own share of every step",
        )

    def figures(self) -> dict[str, Any]:
        """What only the strategy knows of a run, for the summary of its record; every rank calls it."""
        return {}

    def finish(self) -> None:  # noqa: B027  (most leave nothing in flight)
        """Waits for whatever `step` left in flight: the clock of a window stops after this."""

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        """Yields, on every rank, the model with the weights that the run would ship."""
        self.finish()
        yield self.model

    def state(self) -> State:
        """What a checkpoint keeps."""
        self.finish()
        names = {id(p): name for name, p in self.parameters}
        kept = {names[id(p)]: copies(values) for p, values in self.optimizer.state.items()}
        return State(model=copies(self.model.state_dict()), optimizer=kept)

    def load(self, state: State) -> list[str]:
        """Goes on from a state of any world size or strategy; returns what could not be used, in words."""
        self.model.load_state_dict(state.model)
        for name, parameter in self.parameters:
            self.optimizer.state[parameter] = copies(state.optimizer.get(name, {}))
        return [f"{key} of another strategy" for key in state.per_rank]

    def close(self) -> None:
        """Leaves nothing behind: hooks, threads, groups, shared memory."""
        self._attached = None

    def abandon(self) -> None:
        """As `close`, but after an error on this rank: it waits for nobody, since others may wait for this one."""
        self.close()

    # What subclasses build on.

    @property
    def model(self) -> nn.Module:
        """The model as the user made it."""
        return self._while_attached.model

    @property
    def comm(self) -> Comm:
        """The ranks that take part."""
        return self._while_attached.comm

    @property
    def parameters(self) -> NamedParameters:
        """The parameters that want a gradient, each once, by name."""
        return self._while_attached.parameters

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Steps this rank's parameters; schedulers attach to it."""
        return self._while_attached.optimizer

    def gradients(self) -> list[Tensor]:
        """What backward has left, each as a one-dimensional view of its memory; every rank calls it.

        Where parameters may be unused, those that any rank has a gradient for have one, of zeros, on all.
        """
        missing = [name for name, p in self.parameters if p.grad is None]
        if missing and not self.allow_unused:
            raise no_gradient(missing, self.comm.rank)
        if self.allow_unused:
            self._fill_unused()
        return [_flat_gradient(name, p) for name, p in self.parameters if p.grad is not None]

    def _fill_unused(self) -> None:
        """Zeros where another rank has a gradient; nothing where none has, so that no momentum moves the weight."""
        used = self.comm.any_of(torch.tensor([p.grad is not None for _, p in self.parameters], dtype=torch.uint8))
        for (_, parameter), anywhere in zip(self.parameters, used.tolist(), strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def update(self, max_norm: float | None) -> None:
        """Clips what was agreed on, steps the optimiser, clears the gradients."""
        self.comm.mark_agreed()
        if max_norm is not None:
            nn.utils.clip_grad_norm_([p for _, p in self.parameters], max_norm)
        self.optimizer.step()
        for _, parameter in self.parameters:  # All of them: those that a user's optimiser leaves out too.
            parameter.grad = None

    @property
    def _while_attached(self) -> _Attached:
        if self._attached is None:
            raise UsageError(f"{self.name} is used before attach() or after close().")
        return self._attached


def copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with tensors of their own."""
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in values.items()}


@dataclass(frozen=True)
class _Attached:
    """What a strategy holds between `attach` and `close`."""

    model: nn.Module
    comm: Comm
    parameters: NamedParameters
    optimizer: torch.optim.Optimizer


class AfterBackward(Strategy):
    """The classic shape: backward first, then agreement on each gradient, then the optimiser. Write `agree` alone."""

    @abstractmethod
    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Replaces each gradient, a one-dimensional tensor, by its mean over the ranks, in place."""

    def step(self, max_norm: float | None = None) -> None:
        gradients = self.gradients()
        if self.comm.world_size > 1:
            self.agree(gradients)
        self.update(max_norm)


_ALLOW = "remove them, or allow it: --allow-unused, in a loop of your own attach(…, allow_unused=True)"


def no_gradient(names: Sequence[str], rank: int) -> WorkloadError:
    """The error for parameters that backward did not reach (pytorch#43259: DDP only says that it waits for some)."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return WorkloadError(f"{count} got no gradient on rank {rank}: {shown}.", hint=_ALLOW)


def sparse_gradient(name: str) -> WorkloadError:
    """The error for a gradient that is not dense."""
    return WorkloadError(
        f"the gradient of {name} is sparse, which strategies do not send.", hint="use sparse=False in the embedding"
    )


def _flat_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise sparse_gradient(name)
    flat = flat_view(gradient)
    if flat is None:  # Memory with holes: autograd makes none by itself, a user's hook may.
        parameter.grad = gradient.contiguous()
        flat = parameter.grad.view(-1)
    return flat
