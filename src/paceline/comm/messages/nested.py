"""Messages of nested values between ranks, such as batches and checkpoints: tensors as raw bytes, the rest as JSON.

Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.messages.json_messages import as_bytes, receive_bytes, send_bytes
from paceline.errors import WorkloadError

Receive = Callable[[Tensor], object]
"""Function that receives the bytes of a tensor into it."""


class NestedMessage:
    """A nested value, encoded. Raises a `WorkloadError` for a value that cannot be sent.

    It may consist of tensors, NumPy arrays, numbers, strings, None, lists, tuples, named tuples and dicts.
    """

    def __init__(self, value: Any, name: str, hint: str) -> None:
        """Encode a value; `name` is what an error calls it, as in "a batch", and `hint` what the error suggests."""
        self._tensors: list[Tensor] = []
        self._name, self._hint = name, hint
        self._text = json.dumps(self._encode(value)).encode()

    def send(self, rank: int, group: dist.ProcessGroup) -> None:
        """Send the value to a rank, which must call `receive_nested`."""
        send_bytes(self._text, rank, group, tag=0)
        for tensor in self._tensors:
            if tensor.numel():
                dist.send(as_bytes(tensor), group_dst=rank, group=group)

    def broadcast(self, group: dist.ProcessGroup) -> None:
        """Send the value from this rank, which is rank 0, to all others, which must call `receive_broadcast`."""
        dist.broadcast(torch.tensor([len(self._text)]), group_src=0, group=group)
        dist.broadcast(torch.frombuffer(bytearray(self._text), dtype=torch.uint8), group_src=0, group=group)
        for tensor in self._tensors:
            if tensor.numel():
                dist.broadcast(as_bytes(tensor), group_src=0, group=group)

    def _encode(self, value: Any) -> list[Any]:
        """Return the kind of a value and its content, as JSON values; append its tensors to the list."""
        if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
            return ["value", value]
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            self._tensors.append(value.detach().cpu().contiguous())
            return ["tensor", [str(value.dtype).removeprefix("torch."), list(value.shape)]]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            kind = "array" if isinstance(value, np.ndarray) else "array item"
            return [kind, self._encode(torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)))]
        if isinstance(value, Mapping):
            return ["dict", [[self._encode(key), self._encode(one)] for key, one in value.items()]]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named tuple", [_type_name(value), [self._encode(one) for one in value]]]
        if isinstance(value, list | tuple):
            return ["tuple" if isinstance(value, tuple) else "list", [self._encode(one) for one in value]]
        raise WorkloadError(
            f"{self._name} contains a {type(value).__name__}, which ranks cannot send to each other.", hint=self._hint
        )


def receive_nested(rank: int, group: dist.ProcessGroup, like: Any) -> Any:
    """Receive a nested value from a rank; `like` is a value of the same kind, from which named tuples are known."""
    types = {_type_name(value): type(value) for value in _named_tuples(like)}
    text = receive_bytes(rank, group, tag=0)
    return _decode(json.loads(text), lambda tensor: dist.recv(tensor, group_src=rank, group=group), types)


def receive_broadcast(group: dist.ProcessGroup) -> Any:
    """Receive a nested value that rank 0 broadcasts; named tuples become tuples."""

    def receive(tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, group_src=0, group=group)
        return tensor

    length = int(receive(torch.zeros(1, dtype=torch.int64)))
    text = receive(torch.empty(length, dtype=torch.uint8))
    return _decode(json.loads(bytes(text.numpy())), receive, {})


def _decode(encoded: list[Any], receive: Receive, types: Mapping[str, type]) -> Any:
    """Return the value that was encoded; receive its tensors, which follow in the order of the text."""
    kind, content = encoded
    if kind == "value":
        return content
    if kind == "tensor":
        tensor = torch.empty(content[1], dtype=getattr(torch, content[0]))
        if tensor.numel():
            receive(as_bytes(tensor))
        return tensor
    if kind in ("array", "array item"):
        array = _decode(content, receive, types).numpy()
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {_decode(key, receive, types): _decode(one, receive, types) for key, one in content}
    if kind == "named tuple":
        members = [_decode(one, receive, types) for one in content[1]]
        return types[content[0]](*members) if content[0] in types else tuple(members)
    return (tuple if kind == "tuple" else list)(_decode(one, receive, types) for one in content)


def _named_tuples(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield value
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _named_tuples(one)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"
