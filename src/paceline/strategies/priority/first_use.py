"""Records, in one forward pass, the module that had started last when each parameter was first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.comm.messages.nested_tensors import tensors_in
from paceline.strategies.base.uncopied_hook import UncopiedHook


class FirstUses:
    """Recorder of the first use of each parameter, in the model's next forward pass that does not raise.

    At the end of that pass it calls `on_recorded` with the module for each parameter's position, in the order of use.
    The module is not always the owner of the parameter: attention layers read the weights of a projection without
    calling its forward. So all arguments of torch functions are checked for parameters, in this one pass.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], on_recorded: Callable[[dict[int, nn.Module]], None]
    ) -> None:
        self._on_recorded = on_recorded
        self._positions = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._mode: _TensorMode | None = None
        self._module = model
        self._uses: dict[int, nn.Module] = {}
        # Before all other hooks: user hooks may use parameters too (torch.nn.utils.spectral_norm).
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(UncopiedHook(self._on_module), prepend=True) for module in model.modules()
        ]
        self._hooks.append(model.register_forward_pre_hook(UncopiedHook(self._on_forward_start), prepend=True))
        self._hooks.append(model.register_forward_hook(UncopiedHook(self._on_forward_end), always_call=True))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_forward_start(self, model: nn.Module, _: Any) -> None:
        if self._mode is None and torch.is_grad_enabled():
            self._module, self._uses = model, {}
            self._mode = _TensorMode(self._on_tensor)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _on_module(self, module: nn.Module, _: Any) -> None:
        self._module = module

    def _on_tensor(self, tensor: Tensor) -> None:
        position = self._positions.get(id(tensor))
        if position is not None:
            self._uses.setdefault(position, self._module)

    def _on_forward_end(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None
            if output is not None:  # It is None if forward raised.
                self.close()
                self._on_recorded(self._uses)


class _TensorMode(TorchFunctionMode):
    """Mode that calls a function with each tensor argument of torch functions."""

    def __init__(self, on_tensor: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._on_tensor = on_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._on_tensor(tensor)
        return func(*args, **(kwargs or {}))


def can_record(model: nn.Module) -> bool:
    """Return whether Python calls the model module by module; compiled and scripted models are called differently."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # Importing it takes a second.
    compiled = (torch.jit.ScriptModule, *([compiler.OptimizedModule] if compiler is not None else []))
    return not any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in model.modules())
