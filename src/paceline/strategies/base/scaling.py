"""Loss scaling with torch's GradScaler: unscales gradients, and makes all ranks skip a step after an overflow.

`StepSkipper` is a scaler that only skips.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from paceline.errors import UsageError, WorkloadError
from paceline.formatting import short

if TYPE_CHECKING:
    from paceline.strategies.base.strategy import Strategy

_STEP_HINT = "call scaler.scale(loss).backward(), then only sync.step(scaler=scaler), which does the rest"


@dataclass
class _Use:
    """Use of a scaler by a strategy."""

    strategy: weakref.ref[Strategy] | None = None
    skipped: int = 0
    """Number of steps skipped after an overflow."""


_USES: weakref.WeakKeyDictionary[GradScaler, _Use] = weakref.WeakKeyDictionary()


class StepSkipper(GradScaler):
    """Scaler with a constant scale of 1: all ranks skip a step if a gradient on any of them is not finite."""

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=1.0)

    def update(self, new_scale: Any = None) -> None:  # noqa: ARG002
        """Prepare for the next step, without a change of the scale."""
        super().update(new_scale=1.0)


def skipped_steps(scaler: GradScaler | None) -> int:
    """Return the number of steps that were skipped after an overflow, over all uses of a scaler."""
    return 0 if scaler is None or scaler not in _USES else _USES[scaler].skipped


def current_scale(scaler: GradScaler | None) -> Tensor | float:
    """Return the factor by which the scaler multiplies losses, on its device: reading it would wait for the device."""
    return 1.0 if scaler is None or scaler._scale is None else scaler._scale


def scaler_argument(scaler: GradScaler | None) -> dict[str, Any]:
    """Return the scaler as a keyword argument, none without a scaler: a user's own strategy need not accept one."""
    return {} if scaler is None else {"scaler": scaler}


def why_no_scaler(strategy: Strategy) -> str | None:
    """Return the reason why a strategy does not support a GradScaler, as a sentence; None if it does."""
    if not strategy.lockstep:
        return f"{strategy.name} does not support a GradScaler in asynchronous mode: no rank has all gradients."
    if "scaler" not in strategy.supports:
        return f"{strategy.name} does not support a GradScaler."
    for method in (strategy.step, strategy.update):
        if not _accepts_scaler(method):
            return f"{strategy.name} does not support a GradScaler: its method `{method.__name__}` has no `scaler`."
    return None


def _accepts_scaler(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(one.name == "scaler" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def checked_scaler(scaler: object, strategy: Strategy) -> GradScaler | None:
    """Return the scaler of a step, None for none or a disabled one; raise if it cannot be used. Sends nothing."""
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise UsageError(
            f"sync.step() got a scaler of type {type(scaler).__name__}.", hint="pass a torch.amp.GradScaler"
        )
    if not scaler.is_enabled():
        return None
    _check_use(scaler, strategy)
    if scaler._scale is None:
        raise UsageError("the GradScaler passed to sync.step() has not scaled any loss.", hint=_STEP_HINT)
    for key, state in scaler._per_optimizer_states.items():
        if key != id(strategy.optimizer) and state["stage"] is not OptState.READY:
            raise UsageError(
                "the GradScaler passed to sync.step() is also used for another optimiser.",
                hint="create one GradScaler for each optimiser: sync.step() changes the scale after its step",
            )
        if state["stage"] is OptState.UNSCALED:
            raise UsageError(
                "scaler.unscale_() was called before sync.step(scaler=scaler), which unscales by itself.",
                hint="leave unscale_() out; clip with sync.step(max_norm=…, scaler=scaler)",
            )
        if state["stage"] is OptState.STEPPED:
            raise UsageError("scaler.step() was called before sync.step(scaler=scaler).", hint=_STEP_HINT)
    return scaler


def _check_use(scaler: GradScaler, strategy: Strategy) -> None:
    """Raise if the strategy does not support a scaler, or if another sync that is not closed uses this one."""
    use = _USES.setdefault(scaler, _Use())
    before = None if use.strategy is None else use.strategy()
    if before is strategy:
        return
    reason = why_no_scaler(strategy)
    if reason is not None:
        raise UsageError(reason, hint="use another strategy, or train in bfloat16, which needs no scaler")
    if before is not None and before._attached is not None:
        raise UsageError(
            "one GradScaler was passed to two syncs.",
            hint="create one GradScaler for each sync: sync.step() changes the scale after its step",
        )
    use.strategy = weakref.ref(strategy)


def unscale(scaler: GradScaler, strategy: Strategy) -> bool:
    """Unscale this rank's gradients and update the scale; return whether to skip the step: the same on all ranks.

    The step is to be skipped if a gradient on any rank is infinite or not a number. Called once per step, on every rank
    at the same time, with the strategy's own gradients or those that the ranks have agreed on. Ranks that exchange
    nothing decide each for itself.
    """
    _check_dtype(strategy)
    optimizer = strategy.optimizer
    scaler.unscale_(optimizer)
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [p for _, p in strategy.parameters if id(p) not in in_optimizer]  # They are part of the norm for clipping.
    rest: Any = SimpleNamespace(param_groups=[{"params": others}])
    scaler.unscale_(rest)
    states, scale = scaler._per_optimizer_states, scaler._scale
    assert scale is not None, "checked_scaler() raises for a scaler without a scale"
    found = [one for key in (optimizer, rest) for one in states[id(key)]["found_inf_per_device"].values()]
    numbers = torch.stack([scale, *(one.to(scale.device) for one in found)]).tolist()  # One wait for the GPU.
    overflow = _agree_on_overflow(any(numbers[1:]), numbers[0], strategy)
    states.clear()
    states[id(optimizer)]["found_inf_per_device"] = {scale.device: torch.full_like(scale, float(overflow))}
    scaler.update()
    _USES.setdefault(scaler, _Use()).skipped += overflow
    return overflow


def _check_dtype(strategy: Strategy) -> None:
    for name, parameter in strategy.parameters:
        if parameter.grad is not None and parameter.grad.dtype == torch.float16:
            raise WorkloadError(
                f"the gradient of {name} is float16, which a GradScaler cannot unscale.",
                hint="keep the model in float32 and run forward under torch.autocast(…, torch.float16)",
            )


def _agree_on_overflow(own: bool, scale: float, strategy: Strategy) -> bool:
    """Return whether any rank found an overflow, by one small message; raise if the ranks' scales differ."""
    comm = strategy.comm
    if comm.world_size == 1 or not strategy.exchanges:
        return own
    gathered = comm.control.gather(torch.tensor([float(own), scale], dtype=torch.float64))
    overflows, scales = torch.stack(gathered).T.tolist()
    if len(set(scales)) > 1:
        other = next(rank for rank, one in enumerate(scales) if one != scales[0])
        raise UsageError(
            f"the GradScaler's scale is {short(scales[0])} on rank 0 and {short(scales[other])} on rank {other}.",
            hint="create the GradScaler with the same arguments on every rank, and load its state on every rank",
        )
    return any(overflows)
