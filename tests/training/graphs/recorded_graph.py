"""Capture and replay on a CPU, with the rules of a CUDA graph: for tests on machines without a GPU.

Operations are recorded below autograd, with the tensors and numbers of their arguments. A capture leaves no trace: what
it has changed is restored. A replay runs the operations again on the same tensors; no other Python code runs. Reading
a value on the host is refused, as CUDA does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm.messages.nested_tensors import tensors_in

READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero")
Call = tuple[Any, Sequence[Any], dict[str, Any], Any]


class RecordingCapturer:
    """Captures work on a CPU."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def rehearse(self, work: Callable[[], None]) -> None:
        with ReadsRefused():
            work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        generator = torch.get_rng_state()
        recorder = Recorder()
        try:
            with recorder:
                work()
        finally:
            recorder.restore()
            torch.set_rng_state(generator)
        return recorder.replay


class ReadsRefused(TorchDispatchMode):
    """Refusal to read a value on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return func(*args, **kwargs or {})


class Recorder(ReadsRefused):
    """Recorded calls of operations."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in([list(args), kwargs]):
            place = tensor.untyped_storage().data_ptr()
            if place not in self._made and place not in self._before:
                whole = torch.as_strided(tensor.detach(), *_whole(tensor))
                self._before[place] = whole, whole.clone()
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tensors_in(made if isinstance(made, list | tuple) else [made]):
            if tensor.untyped_storage().data_ptr() not in self._before:
                self._made.add(tensor.untyped_storage().data_ptr())
        self._calls.append((func, args, kwargs, made))
        return made

    def restore(self) -> None:
        """Undo all changes of tensors that existed before."""
        with torch.no_grad():
            for tensor, value in self._before.values():
                tensor.copy_(value)
        self._before.clear()

    def replay(self) -> None:
        """Run the operations again."""
        with torch.no_grad():
            for func, args, kwargs, made in self._calls:
                returns = func._schema.returns
                if func._schema.name.startswith(("aten::empty", "aten::new_empty")) or _is_view(returns):
                    continue
                again = func(*args, **kwargs)
                for one, old, new in zip(returns, _as_list(made, returns), _as_list(again, returns), strict=True):
                    if one.alias_info is None:
                        for target, value in zip(tensors_in(old), tensors_in(new), strict=True):
                            target.detach().copy_(value)


def _whole(tensor: Tensor) -> tuple[tuple[int], tuple[int], int]:
    return (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0


def _as_list(made: Any, returns: Sequence[Any]) -> list[Any]:
    if not returns:
        return []
    return list(made) if len(returns) > 1 else [made]


def _is_view(returns: Sequence[Any]) -> bool:
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
