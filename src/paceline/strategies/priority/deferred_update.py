"""Parameters with a deferred update: the update runs before the first function of torch that reads the values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.messages.nested_tensors import tensors_in


class DeferredParameter(nn.Parameter):
    """Parameter with a deferred update: the same object, with its class changed until the update.

    Before a function of torch runs, torch calls `__torch_function__` of its arguments' classes. This one runs the
    update, which makes the object a plain parameter again, and then calls the function. So a weight may be read by any
    code and in any order, and a plain parameter has no overhead.
    """

    _apply_update: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs)):
            _update(tensor)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _update(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _update(self)
        return self.__reduce_ex__(protocol)


def can_defer(parameter: nn.Parameter) -> bool:
    """Return whether it is a plain parameter: a subclass may have its own `__torch_function__`."""
    return type(parameter) is nn.Parameter


def defer(parameter: nn.Parameter, apply_update: Callable[[], None]) -> None:
    """Defer the parameter's update until a function of torch reads it; `apply_update` must call `release`."""
    parameter.__class__ = DeferredParameter
    parameter._apply_update = apply_update  # type: ignore[attr-defined]


def release(parameter: nn.Parameter) -> None:
    """Make it a plain parameter again, if its update is deferred."""
    if isinstance(parameter, DeferredParameter):
        del parameter._apply_update
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _update(tensor: Tensor) -> None:
    if isinstance(tensor, DeferredParameter):
        tensor._apply_update()


_update._torchdynamo_disable = True  # type: ignore[attr-defined]  # Importing `torch.compiler.disable` takes a second.

_METADATA = ("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize", "is_cuda", "is_leaf", "grad_fn")
_METADATA_FUNCTIONS = frozenset(
    {getattr(Tensor, name).__get__ for name in (*_METADATA, "requires_grad", "grad")}
    | {vars(torch._C.TensorBase)["grad"].__set__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement}
    | {Tensor.stride, Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex}
)
"""Functions that do not read values, such as reading a shape or clearing a gradient; they do not run the update."""
