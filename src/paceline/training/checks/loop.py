"""Checks of a training loop against misuse that would train wrongly without an error: parameters, calls, optimiser."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import UsageError, WorkloadError
from paceline.strategies.base.abilities import UpdatesInParts
from paceline.strategies.base.strategy import Strategy
from paceline.strategies.base.uncopied_hook import UncopiedHook
from paceline.training.checks.attach_arguments import check_optimizer_parameters

_CALL_HINT = "call sync.model(x); to evaluate the model itself, call it in eval mode or inside torch.no_grad()"
_STEP_HINT = "call sync.step(), which synchronises gradients and then steps the optimiser; it takes max_norm and scaler"
_AGAIN_HINT = "do this before attach(), or call close() and attach() again"
_FREEZE_HINT = "freeze it before attach(), or allow parameters without a gradient: attach(…, allow_unused=True)"

_open_checks: tuple[weakref.ref[LoopChecks], ...] = ()
"""Checks of all attached models. It is replaced, never changed, because servers step optimisers in other threads."""


@functools.cache
def watch_optimizers() -> None:
    """Check the steps of all optimisers from now on; call it before a strategy starts a thread that steps one.

    Torch keeps such hooks in one dict for all optimisers. Adding or removing one while another thread steps any
    optimiser would raise an error there, so this one is added once, and stays.
    """
    register_optimizer_step_pre_hook(_on_optimizer_step)


def _on_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for reference in _open_checks:
        checks = reference()
        if checks is not None:
            checks._check_optimizer_step(optimizer)


_on_optimizer_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def check_not_attached(model: nn.Module) -> None:
    """Raise if a parameter of the model is already synchronised by another `Sync`."""
    for name, parameter in model.named_parameters():
        attached = (reference() for reference in _open_checks)
        if parameter.requires_grad and any(checks is not None and checks.trains(parameter) for checks in attached):
            raise UsageError(
                f"{name} is already attached: two strategies would synchronise it.",
                hint="call close() of the first attach() before the second",
            )


def _replace_open_checks(*, without: LoopChecks | None, added: LoopChecks | None) -> None:
    global _open_checks
    kept = [found for reference in _open_checks if (found := reference()) is not None and found is not without]
    _open_checks = tuple(weakref.ref(checks) for checks in [*kept, *([] if added is None else [added])])


class LoopChecks:
    """Checks of one attached model, from attach to detach. `with checks:` surrounds each step of the strategy.

    A step checks that the parameters are those that were attached, and, where the strategy wraps the model, that the
    gradients come from the wrapped model. Hooks refuse training calls of the model itself, and steps of an optimiser
    outside the strategy. All of it takes a few microseconds per step.
    """

    def __init__(self, model: nn.Module, wrapped: nn.Module, strategy: Strategy) -> None:
        self._model, self._strategy, self._optimizer = model, strategy, strategy.optimizer
        self._thread = threading.get_ident()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._by_name = dict(model.named_parameters())
        self._trained = [parameter for _, parameter in strategy.parameters]
        self._trained_ids = {id(parameter) for parameter in self._trained}
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._kinds = [_kind(parameter) for parameter in self._trained]
        self._optimizer_size = _size(self._optimizer)
        self._steps = 0
        self._may_have_changed = False
        """Whether a parameter or module was registered anywhere since the last step."""
        self._is_stepping = False
        self._is_agreed = False
        self._is_wrapped = wrapped is not model
        self._expects_model_call = False
        """Whether the wrapped model was called, and has not called the model yet."""
        self._has_called_wrapped = False
        """Whether the wrapped model was called, with gradients enabled, since the last step."""
        self._wrapped = wrapped
        self._hooks = ExitStack()
        self._add_hooks(wrapped)
        watch_optimizers()
        _replace_open_checks(without=None, added=self)

    def close(self) -> None:
        """Remove the hooks."""
        _replace_open_checks(without=self, added=None)
        self._hooks.close()

    def trains(self, parameter: nn.Parameter) -> bool:
        """Return whether it is a parameter that the strategy synchronises."""
        return id(parameter) in self._trained_ids

    def __enter__(self) -> None:
        self._steps += 1
        self._check_parameters()
        if self._is_wrapped and not self._has_called_wrapped and any(p.grad is not None for p in self._trained):
            raise self._call_error("this step has gradients, and sync.model was not called")
        if _size(self._optimizer) != self._optimizer_size:
            check_optimizer_parameters(self._optimizer, self._strategy.parameters, self._model)
            self._optimizer_size = _size(self._optimizer)
        self._is_stepping = True

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._is_stepping = self._expects_model_call = self._has_called_wrapped = False
        if isinstance(error, WorkloadError):  # A gradient may be missing because its parameter was changed.
            reason = self._find_frozen() or self._find_changed()
            if reason is not None:
                raise reason from None

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Permit calls of the model itself inside the `with` block, which evaluates it."""
        before, self._is_agreed = self._is_agreed, True
        try:
            yield
        finally:
            self._is_agreed = before

    # Parameters.

    def _check_parameters(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise _changed(name, "was unfrozen after attach(), so it is not synchronised")
        # Parameters are noticed when they are registered with a module, and conversions of the model by its first
        # parameter. Code may bypass both: all of the model is searched after steps 1, 2, 4, 8 and so on.
        is_converted = _kind(self._trained[0]) != self._kinds[0]
        if self._may_have_changed or is_converted or not self._steps & (self._steps - 1):
            self._may_have_changed = False
            reason = self._find_changed()
            if reason is not None:
                raise reason

    def _find_changed(self) -> WorkloadError | None:
        """Return the error for a parameter that was added, replaced, removed or converted; None without one."""
        found = dict(self._model.named_parameters())
        for name, parameter in found.items():
            if id(parameter) in self._names:
                continue
            replaced = self._by_name.get(name)
            if replaced is not None and (replaced.requires_grad or parameter.requires_grad):
                return _changed(name, "was replaced by another parameter after attach()")
            if parameter.requires_grad:
                return _changed(name, "was added to the model after attach(), so it is not synchronised")
        left = {id(parameter) for parameter in found.values()}
        for parameter, before in zip(self._trained, self._kinds, strict=True):
            name, now = self._names[id(parameter)], _kind(parameter)
            if id(parameter) not in left and not self._strategy.allow_unused:
                return _changed(name, "was removed from the model after attach()")
            if now != before:
                return _changed(name, f"was {_text(before)} at attach(), and is now {_text(now)}")
        return None

    def _find_frozen(self) -> WorkloadError | None:
        """Return the error for a parameter that was frozen after it was attached; None without one."""
        for parameter in self._trained:
            if not parameter.requires_grad:
                return _changed(self._names[id(parameter)], "was frozen after attach()", _FREEZE_HINT)
        return None

    # Hooks.

    def _add_hooks(self, wrapped: nn.Module) -> None:
        reference = weakref.ref(self)  # A global hook would keep an object that is never closed alive.

        def on_registration(*_: Any) -> None:
            checks = reference()
            if checks is not None:
                checks._may_have_changed = True

        hooks = [
            register_module_parameter_registration_hook(on_registration),
            register_module_module_registration_hook(on_registration),
        ]
        if self._is_wrapped:
            hooks += [
                wrapped.register_forward_pre_hook(UncopiedHook(self._on_wrapped_call), prepend=True),
                self._model.register_forward_pre_hook(UncopiedHook(self._on_model_call), prepend=True),
            ]
        for hook in hooks:
            self._hooks.callback(hook.remove)

    # These two set flags and count nothing: torch.compile would compile again for each new value of a counter.

    def _on_wrapped_call(self, _: nn.Module, __: Any) -> None:
        self._expects_model_call = True
        if torch.is_grad_enabled():
            self._has_called_wrapped = True

    def _on_model_call(self, model: nn.Module, _: Any) -> None:
        if self._expects_model_call:
            self._expects_model_call = False
            return
        if not model.training or not torch.is_grad_enabled() or self._is_agreed or _is_called_by(self._wrapped):
            return
        if any(parameter.requires_grad for parameter in self._trained):
            raise self._call_error("the model itself was called in training")

    def _check_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimiser steps attached parameters and the strategy did not call it.

        A call without gradients changes nothing, and is permitted: some schedulers need one before they start.
        """
        if self._is_stepping:  # In `sync.step()`, an optimiser may call another one that it wraps.
            return
        # Every optimiser of the process comes here, also those of other models: so what most often returns comes first.
        names = [
            self._names[id(p)]
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in self._names and p.grad is not None
        ]
        if not names:
            return
        strategy = self._strategy
        if isinstance(strategy, UpdatesInParts) and strategy.partial_update_step() is not None:
            return
        if _is_called_by(strategy):  # As in `finish`, or in a hook of backward.
            return
        if optimizer is not self._optimizer:
            raise WorkloadError(
                f"an optimiser that attach() did not receive, {type(optimizer).__name__}, steps {names[0]}.",
                hint="return one optimiser from make_optimizer, with a parameter group for each set of parameters",
            )
        if threading.get_ident() == self._thread:  # A strategy may step in a thread of its own.
            raise WorkloadError("the optimiser was stepped without sync.step().", hint=_STEP_HINT)

    def _call_error(self, found: str) -> WorkloadError:
        name = self._strategy.name
        return WorkloadError(f"{found}; {name} synchronises only gradients that come from sync.model.", hint=_CALL_HINT)


def _is_called_by(owner: object) -> bool:
    """Return whether a method of an object is running, and has called this function, directly or not.

    Inside a compiled function it returns True: torch.compile cannot trace it. The step still detects wrong calls.
    """
    if torch.compiler.is_compiling():
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is not owner:
        frame = frame.f_back
    return frame is not None


def _changed(name: str, change: str, hint: str = _AGAIN_HINT) -> WorkloadError:
    return WorkloadError(f"{name} {change}.", hint=hint)


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device, torch.Size]:
    return parameter.dtype, parameter.device, parameter.shape


def _text(kind: tuple[torch.dtype, torch.device, torch.Size]) -> str:
    dtype, device, shape = kind
    return f"{dtype} on {device} with the shape {tuple(shape)}"


def _size(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of parameters of an optimiser."""
    return sum(len(group["params"]) for group in optimizer.param_groups)
