"""JSON messages between ranks: tensors are sent as raw bytes, all other values as JSON. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.control import ControlChannel
from paceline.errors import WorkloadError
from paceline.records.writer import encode

JsonMessage = Mapping[str, Mapping[str, Any]]
"""Values by two keys, as in an optimiser's state: the parameter, then the name of the value."""


SentT = TypeVar("SentT")


def gather_typed(value: SentT, kind: type[SentT], control: ControlChannel) -> list[SentT]:
    """Return every rank's value of a type, such as a part of a record, on every rank. NaN becomes None."""
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(text) for text in _gather_bytes(encode(value), control)]


def _gather_bytes(text: bytes, control: ControlChannel) -> list[bytes]:
    lengths = [int(length) for length in control.gather(torch.tensor(len(text)))]
    padded = text.ljust(max(lengths))
    received = control.gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
    return [bytes(tensor.numpy())[:length] for tensor, length in zip(received, lengths, strict=True)]


def send_typed(value: Any, rank: int, group: dist.ProcessGroup, tag: int = 0) -> None:
    """Send a value to a rank, which must call `receive_typed` with its type. NaN becomes None."""
    send_bytes(encode(value), rank, group, tag)


def receive_typed(kind: type[SentT], rank: int, group: dist.ProcessGroup, tag: int = 0) -> SentT:
    """Receive a value of a type that a rank sends with `send_typed`."""
    return msgspec.json.decode(receive_bytes(rank, group, tag), type=kind)


def send_bytes(text: bytes, rank: int, group: dist.ProcessGroup, tag: int) -> None:
    """Send bytes, of any number, to a rank, which must call `receive_bytes`."""
    dist.send(torch.tensor([len(text)]), group_dst=rank, group=group, tag=tag)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), group_dst=rank, group=group, tag=tag)


def receive_bytes(rank: int, group: dist.ProcessGroup, tag: int) -> bytes:
    """Receive bytes that a rank sends with `send_bytes`."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, group_src=rank, group=group, tag=tag)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(text, group_src=rank, group=group, tag=tag)
    return bytes(text.numpy())


def send_json_message(message: JsonMessage, rank: int, group: dist.ProcessGroup, tag: int = 0) -> None:
    """Send a message to a rank, which must call `receive_json_message`."""
    tensors = [value for values in message.values() for value in values.values() if isinstance(value, Tensor)]
    header = {name: {key: _encode(key, value) for key, value in values.items()} for name, values in message.items()}
    send_bytes(json.dumps(header).encode(), rank, group, tag)
    for tensor in tensors:
        if tensor.numel():
            dist.send(as_bytes(tensor.detach().cpu().contiguous()), group_dst=rank, group=group, tag=tag)


def receive_json_message(rank: int, group: dist.ProcessGroup, tag: int = 0) -> dict[str, dict[str, Any]]:
    """Receive a message that a rank sends with `send_json_message`; its tensors are in main memory."""
    header: dict[str, dict[str, list[Any]]] = json.loads(receive_bytes(rank, group, tag))
    return {
        name: {key: _decode(kind, content, rank, group, tag) for key, (kind, content) in values.items()}
        for name, values in header.items()
    }


def _encode(key: str, value: Any) -> list[Any]:
    """Return the header entry of a value: dtype and shape of a tensor, else "value" and the value itself."""
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape)]
    if not isinstance(value, bool | int | float | str | None):
        raise WorkloadError(
            f"the optimiser's state {key!r} is a {type(value).__name__}, which parameter servers cannot send.",
            hint="use an optimiser whose state holds only tensors, numbers and strings, or another strategy",
        )
    return ["value", value]


def _decode(kind: str, content: Any, rank: int, group: dist.ProcessGroup, tag: int) -> Any:
    """Return the value of a header entry; receive it first if it is a tensor."""
    if kind == "value":
        return content
    tensor = torch.empty(content, dtype=getattr(torch, kind))
    if tensor.numel():
        dist.recv(as_bytes(tensor), group_src=rank, group=group, tag=tag)
    return tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as a one-dimensional view of its bytes.

    A tensor of one element is contiguous with any stride, and `reshape` keeps the stride, which `view` may refuse.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
