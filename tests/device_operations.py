"""Operations of a piece of code as a GPU would run them, counted on a CPU; those that wait for the GPU are refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_UPLOADS = {torch.tensor, torch.as_tensor, Tensor.new_tensor, Tensor.pin_memory}
"""Functions that copy numbers of the host to the device, from memory that is not page-locked."""
_READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero"}
"""Operations whose result the host needs to go on."""
FUSED_TENSORS = 50
"""Tensors that one kernel of a list operation processes, about."""


class DeviceOperations(TorchDispatchMode):
    """Kernels that a GPU would be given, by operation. One on lists is one kernel per `FUSED_TENSORS` tensors.

    That holds if the lists have the same shapes and dtypes, or their second operand is a number or a tensor without
    dimensions of the same dtype. Otherwise torch runs a kernel per tensor.
    """

    def __init__(self, *, may_read: bool = False) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.reads = 0
        """Operations that wait for the device; without `may_read` the first one raises."""
        self._may_read = may_read

    @property
    def total(self) -> int:
        return self.kernels.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in _READS:
            assert self._may_read, f"{name} waits for the device"
            self.reads += 1
        if name.startswith("_foreach_"):
            self.kernels[name] += _kernels_of_lists(args)
        elif not func.is_view and not name.startswith(("empty", "_reshape_alias")):
            self.kernels[name] += 1
        return result


def _kernels_of_lists(args: Any) -> int:
    lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
    first = lists[0]
    others = [one for one in args if isinstance(one, Tensor)]
    kinds = [[(tensor.shape, tensor.dtype) for tensor in one] for one in lists]
    is_fused = len({one.dtype for one in [*first, *others]}) == 1 and all(kind == kinds[0] for kind in kinds)
    return math.ceil(len(first) / FUSED_TENSORS) if is_fused else len(first)


class _RefuseUploads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_upload = func in _UPLOADS and not (func is torch.as_tensor and isinstance(args[0], Tensor))
        assert not is_upload, f"{func.__name__} copies from the host, and waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def without_waiting() -> Iterator[DeviceOperations]:
    """Fail if the `with` block does what would make the host wait for a GPU; yield the count of its kernels."""
    with DeviceOperations() as operations, _RefuseUploads():
        yield operations


def kernels_of(function: Callable[[], Any]) -> Counter[str]:
    """Return the kernels of a function that must not wait for the device."""
    with without_waiting() as operations:
        function()
    return operations.kernels
