"""A weight whose last update is still to come: whatever reads it has the update made first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class DeferredParameter(nn.Parameter):
    """What a parameter is until its update: the same object, of another class.

    Torch asks the class of each tensor that a function is given whether it wants to see the call first
    (`__torch_function__`). This one has the update made, which makes it a plain parameter again, and the call goes on.
    So it does not matter who reads a weight, where, or in which order; and a plain parameter costs nothing.
    """

    _have_updated: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
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
    """Whether it is a plain parameter: those of a class of their own have their own reading of calls."""
    return type(parameter) is nn.Parameter


def defer(parameter: nn.Parameter, have_updated: Callable[[], None]) -> None:
    """Has the parameter updated by `have_updated`, which has to `release` it, before anything of torch reads it."""
    parameter.__class__ = DeferredParameter
    parameter._have_updated = have_updated  # type: ignore[attr-defined]


def release(parameter: nn.Parameter) -> None:
    """Makes it a plain parameter again."""
    if isinstance(parameter, DeferredParameter):
        del parameter._have_updated
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of a call."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def _update(tensor: Tensor) -> None:
    if isinstance(tensor, DeferredParameter):
        tensor._have_updated()


_update._torchdynamo_disable = True  # type: ignore[attr-defined]  # `torch.compiler.disable` takes a second to import.

_DESCRIPTION = ("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize", "is_cuda", "is_leaf", "grad_fn")
_LOOKS = frozenset(
    {getattr(Tensor, name).__get__ for name in (*_DESCRIPTION, "requires_grad", "grad")}
    | {vars(torch._C.TensorBase)["grad"].__set__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement}
    | {Tensor.stride, Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex}
)
"""What does not ask for values: optimisers are cleared and models ask for a weight's type without waiting."""
