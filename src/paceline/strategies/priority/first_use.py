"""Finds out, in one forward pass, which module had begun last before each parameter was first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.strategies.priority.deferred_update import tensors_in


class FirstUses:
    """Watches the next forward pass of a model that ends well, then tells what it saw.

    The module that begins a parameter's first use need not be the one that owns it: attention layers read the weights
    of a projection whose own forward nobody calls. So every call of torch is looked at for parameters, once.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], tell: Callable[[dict[int, nn.Module]], None]
    ) -> None:
        self._tell = tell
        self._positions = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._watching: _Watching | None = None
        self._begun = model
        self._uses: dict[int, nn.Module] = {}
        # Before all other hooks: those of a user may use parameters too (torch.nn.utils.spectral_norm).
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._begins, prepend=True) for module in model.modules()
        ]
        self._hooks.append(model.register_forward_pre_hook(self._starts, prepend=True))
        self._hooks.append(model.register_forward_hook(self._ends, always_call=True))

    def close(self) -> None:
        """Watches no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _starts(self, model: nn.Module, _: Any) -> None:
        if self._watching is None and torch.is_grad_enabled():
            self._begun, self._uses = model, {}
            self._watching = _Watching(self._used)
            self._watching.__enter__()  # type: ignore[no-untyped-call]

    def _begins(self, module: nn.Module, _: Any) -> None:
        self._begun = module

    def _used(self, tensor: Tensor) -> None:
        position = self._positions.get(id(tensor))
        if position is not None:
            self._uses.setdefault(position, self._begun)

    def _ends(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._watching is not None:
            self._watching.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._watching = None
            if output is not None:  # It is None where forward has raised.
                self.close()
                self._tell(self._uses)


class _Watching(TorchFunctionMode):
    """Shows the tensors that functions of torch are given."""

    def __init__(self, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._seen(tensor)
        return func(*args, **(kwargs or {}))


def can_watch(model: nn.Module) -> bool:
    """Whether a model is called module by module; compiled and scripted ones are not, or not by Python."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # To import it takes a second.
    compiled = (torch.jit.ScriptModule, *([compiler.OptimizedModule] if compiler is not None else []))
    return not any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in model.modules())
