"""Checks of what a user attaches: the arguments of `paceline.attach`, the model, and the optimiser it creates."""

from __future__ import annotations

import inspect
import math
import sys
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.config import BatchNormMode, ReplicaGuardMode
from paceline.errors import UsageError, WorkloadError, wrong_choice
from paceline.formatting import plural
from paceline.strategies.base.strategy import NamedParameters

_SHARDED = ("FullyShardedDataParallel", "FSDPModule")
"""Names of torch's sharding wrappers: importing them takes a second."""


def check_arguments(
    model: object,
    make_optimizer: object,
    strategy: object,
    *,
    bn: object,
    allow_unused: object,
    replica_guard: object,
    hang_timeout: object,
    timeout: object,
    check_collectives: object,
) -> None:
    """Raise a UsageError for an argument of `attach` that has the wrong type or value."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"attach() got {_kind(model)} as the model.", hint="pass a torch.nn.Module")
    if isinstance(make_optimizer, torch.optim.Optimizer):
        name = type(make_optimizer).__name__
        module = "torch.optim." if hasattr(torch.optim, name) else ""
        raise UsageError(
            f"attach() got {_kind(make_optimizer)} instead of a function that creates the optimiser.",
            hint=f"pass `lambda params: {module}{name}(params, lr=…)`, and use sync.optimizer afterwards",
        )
    if not callable(make_optimizer):
        raise UsageError(
            f"attach() got {_kind(make_optimizer)} instead of a function that creates the optimiser.",
            hint="pass `lambda params: torch.optim.SGD(params, lr=…)`",
        )
    if not _accepts_one_argument(make_optimizer):
        raise UsageError(
            "attach() calls make_optimizer with one argument, which this function does not accept.",
            hint="let it take the (name, parameter) pairs: `lambda params: torch.optim.SGD(params, lr=…)`",
        )
    if strategy is not None and not isinstance(strategy, str):
        raise UsageError(
            f"attach() got {_kind(strategy)} as the strategy.",
            hint='pass its name, such as "ddp", or "module:Class" for your own',
        )
    if bn not in typing.get_args(BatchNormMode):
        raise wrong_choice("bn", str(bn), typing.get_args(BatchNormMode))
    if not isinstance(allow_unused, bool):
        raise UsageError(f"allow_unused is {allow_unused!r}.", hint="pass True or False")
    if replica_guard not in typing.get_args(ReplicaGuardMode):
        raise wrong_choice("replica_guard", str(replica_guard), typing.get_args(ReplicaGuardMode))
    if not (_is_seconds(hang_timeout) and hang_timeout >= 0):  # type: ignore[operator]
        raise UsageError(f"hang_timeout is {hang_timeout!r}.", hint="pass a number of seconds, or 0 for no watchdog")
    if timeout is not None and not (_is_seconds(timeout) and timeout > 0):  # type: ignore[operator]
        raise UsageError(f"timeout is {timeout!r}.", hint="pass a number of seconds that is more than 0")
    if not isinstance(check_collectives, bool):
        raise UsageError(f"check_collectives is {check_collectives!r}.", hint="pass True or False")
    _check_model(model)


def _check_model(model: nn.Module) -> None:
    """Raise for a model that no strategy can synchronise."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if isinstance(module, DistributedDataParallel | DataParallel) or kinds & {*_SHARDED}:
            where = f"{name} is" if name else "the model is"
            kind = next((kind for kind in _SHARDED if kind in kinds), type(module).__name__)
            raise UsageError(
                f"{where} already parallel: {kind} synchronises it.",
                hint="attach the plain model; the strategy ddp wraps it in DistributedDataParallel",
            )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise UsageError(f"{name} has no shape yet.", hint="run the model on one batch before attach()")
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device and has no values.",
                hint="create the model on its device, or call model.to_empty(device=…) and initialise it",
            )
    devices = {str(tensor.device) for tensor in tensors.values()}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on {plural(len(devices), 'device')}: {', '.join(sorted(devices))}.",
            hint="move the whole model to one device, with model.to(device)",
        )
    sharded = sys.modules.get("torch.distributed.tensor")
    for name, tensor in tensors.items():
        if sharded is not None and isinstance(tensor, sharded.DTensor):
            raise UsageError(f"{name} is a DTensor, which another wrapper shards.", hint="attach the plain model")


def check_optimizer(optimizer: Any, parameters: NamedParameters, model: nn.Module) -> None:
    """Raise if `make_optimizer` returned something that a strategy cannot step, given the parameters it received."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            f"make_optimizer returned {_kind(optimizer)}, not an optimiser.",
            hint="return an instance of torch.optim.Optimizer or of a subclass",
        )
    needed = [name for name, argument in inspect.signature(optimizer.step).parameters.items() if _is_required(argument)]
    if needed:
        raise WorkloadError(
            f"{type(optimizer).__name__} cannot be used: its step() needs the argument {needed[0]!r}, and strategies "
            "step an optimiser once per synchronised gradient.",
            hint="use an optimiser that needs no closure, such as SGD or AdamW",
        )
    check_optimizer_parameters(optimizer, parameters, model)


def check_optimizer_parameters(optimizer: torch.optim.Optimizer, parameters: NamedParameters, model: nn.Module) -> None:
    """Raise if an optimiser steps a parameter that is not synchronised; frozen parameters of the model are permitted.

    It may have fewer parameters: the others keep their values on every rank.
    """
    known = {id(p) for _, p in parameters} | {id(p) for p in model.parameters() if not p.requires_grad}
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [parameter for parameter in stepped if id(parameter) not in known]
    if others:
        shape = "×".join(map(str, others[0].shape)) or "a single value"
        raise WorkloadError(
            f"{type(optimizer).__name__} has {plural(len(others), 'parameter')} that make_optimizer did not receive "
            f"(the first has the shape {shape}), so no strategy synchronises them.",
            hint="create the optimiser from the parameters that make_optimizer receives; "
            "make other modules, such as a loss with weights, part of the model",
        )


def _accepts_one_argument(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument; True if Python does not know its signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _is_required(argument: inspect.Parameter) -> bool:
    positional = argument.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return positional and argument.default is inspect.Parameter.empty


def _kind(value: object) -> str:
    """Return the type of a value, for an error message."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"an object of type {name}"


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
