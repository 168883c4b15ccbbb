"""What one rank sends another by name: tensors as they are, everything else in JSON. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import WorkloadError

JsonMessage = Mapping[str, Mapping[str, Any]]
"""As an optimiser keeps its state: by parameter, then by name."""


def send_json_message(parcel: JsonMessage, rank: int, group: dist.ProcessGroup, tag: int = 0) -> None:
    """Sends a parcel to a rank, which calls `receive_json_message`."""
    tensors = [value for values in parcel.values() for value in values.values() if isinstance(value, Tensor)]
    label = {name: {key: _label(key, value) for key, value in values.items()} for name, values in parcel.items()}
    text = json.dumps(label).encode()
    dist.send(torch.tensor([len(text)]), group_dst=rank, group=group, tag=tag)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), group_dst=rank, group=group, tag=tag)
    for tensor in tensors:
        if tensor.numel():
            dist.send(_bytes(tensor.detach().cpu().contiguous()), group_dst=rank, group=group, tag=tag)


def receive_json_message(rank: int, group: dist.ProcessGroup, tag: int = 0) -> dict[str, dict[str, Any]]:
    """Receives what a rank sends with `send_json_message`; tensors are in main memory."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, group_src=rank, group=group, tag=tag)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(text, group_src=rank, group=group, tag=tag)
    label: dict[str, dict[str, list[Any]]] = json.loads(bytes(text.numpy()))
    return {
        name: {key: _open(kind, inside, rank, group, tag) for key, (kind, inside) in values.items()}
        for name, values in label.items()
    }


def _label(key: str, value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape)]
    if not isinstance(value, bool | int | float | str | None):
        raise WorkloadError(f"the optimiser keeps {key} as a {type(value).__name__}, which servers do not send.")
    return ["value", value]


def _open(kind: str, inside: Any, rank: int, group: dist.ProcessGroup, tag: int) -> Any:
    if kind == "value":
        return inside
    tensor = torch.empty(inside, dtype=getattr(torch, kind))
    if tensor.numel():
        dist.recv(_bytes(tensor), group_src=rank, group=group, tag=tag)
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
