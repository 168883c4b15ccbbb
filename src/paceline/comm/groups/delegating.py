"""Process group that delegates every operation to an inner group; subclasses add to it what they need."""

# mypy: disable-error-code="override, assignment"
# (torch declares overloads that are called neither from its Python code nor from C++.)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from paceline.comm.groups.local import NewGroup
from paceline.records.timeline import NO_PEER, RowKind

BACKEND = "paceline"
"""Name of this backend in torch."""


class DelegatingGroup(dist.ProcessGroup):
    """Process group around another one, on which `_run` and `_message` run its operations."""

    def __init__(self, inner: dist.ProcessGroup, members: Sequence[int]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self._members = members
        """Ranks in the run of the members of the group."""
        self._name = self._description = ""

    @abstractmethod
    def _run(
        self, kind: RowKind, size: int, peer: int, opts: Any, call: Callable[..., dist.Work | None], *arguments: Any
    ) -> dist.Work | None:
        """Run a collective, `call(*arguments, opts)`; `size` is in bytes, `peer` its root in the group."""

    @abstractmethod
    def _message(
        self, kind: RowKind, peer: int, call: Callable[..., dist.Work], tensors: list[Tensor], *arguments: Any
    ) -> dist.Work:
        """Send or receive a message, `call(tensors, *arguments)`; `peer` is in the group."""

    def _member(self, peer: int) -> int:
        """Return a peer's rank in the run. An invalid peer is returned unchanged: the inner group raises the error."""
        return self._members[peer] if 0 <= peer < len(self._members) else peer

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or AllreduceOptions()
        return self._run(RowKind.ALL_REDUCE, bytes_of(tensors), NO_PEER, opts, self.inner.allreduce, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or AllreduceCoalescedOptions()
        return self._run(RowKind.ALL_REDUCE, bytes_of(tensors), NO_PEER, opts, self.inner.allreduce_coalesced, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or BroadcastOptions()
        return self._run(RowKind.BROADCAST, bytes_of(tensors), opts.rootRank, opts, self.inner.broadcast, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or ReduceOptions()
        return self._run(RowKind.REDUCE, bytes_of(tensors), opts.rootRank, opts, self.inner.reduce, tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or GatherOptions()
        size = bytes_of(inputs) * len(self._members)
        return self._run(RowKind.GATHER, size, opts.rootRank, opts, self.inner.gather, outputs, inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work | None:
        opts = opts or ScatterOptions()
        size = bytes_of(outputs) * len(self._members)
        return self._run(RowKind.SCATTER, size, opts.rootRank, opts, self.inner.scatter, outputs, inputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or AllgatherOptions()
        size = bytes_of(inputs) * len(self._members)
        return self._run(RowKind.ALL_GATHER, size, NO_PEER, opts, self.inner.allgather, outputs, inputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        opts = opts or AllgatherOptions()
        size = bytes_of(inputs) * len(self._members)
        return self._run(RowKind.ALL_GATHER, size, NO_PEER, opts, self.inner.allgather_coalesced, outputs, inputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work | None:
        opts = opts or AllgatherOptions()
        return self._run(
            RowKind.ALL_GATHER, bytes_of([output]), NO_PEER, opts, self.inner._allgather_base, output, tensor
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        opts, call = opts or AllgatherOptions(), self.inner.allgather_into_tensor_coalesced
        return self._run(RowKind.ALL_GATHER, bytes_of(outputs), NO_PEER, opts, call, outputs, inputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work | None:
        opts = opts or ReduceScatterOptions()
        size = bytes_of(outputs) * len(self._members)
        return self._run(RowKind.REDUCE_SCATTER, size, NO_PEER, opts, self.inner.reduce_scatter, outputs, inputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work | None:
        opts, call = opts or ReduceScatterOptions(), self.inner._reduce_scatter_base
        return self._run(RowKind.REDUCE_SCATTER, bytes_of([tensor]), NO_PEER, opts, call, output, tensor)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        opts, call = opts or ReduceScatterOptions(), self.inner.reduce_scatter_tensor_coalesced
        return self._run(RowKind.REDUCE_SCATTER, bytes_of(inputs), NO_PEER, opts, call, outputs, inputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or AllToAllOptions()
        return self._run(RowKind.ALL_TO_ALL, bytes_of(inputs), NO_PEER, opts, self.inner.alltoall, outputs, inputs)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work | None:
        opts, splits = opts or AllToAllOptions(), (output_splits, input_splits)
        size = bytes_of([tensor])
        return self._run(RowKind.ALL_TO_ALL, size, NO_PEER, opts, self.inner.alltoall_base, output, tensor, *splits)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work | None:
        return self._message(RowKind.SEND, dst, self.inner.send, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work | None:
        return self._message(RowKind.RECV, src, self.inner.recv, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work | None:
        return self._message(RowKind.RECV, NO_PEER, self.inner.recv_anysource, tensors, tag)

    def barrier(self, opts: Any = None) -> dist.Work | None:
        return self._run(RowKind.BARRIER, 0, NO_PEER, opts or BarrierOptions(), self.inner.barrier)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        def call(_: Any) -> None:
            self.inner.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]

        self._run(RowKind.BARRIER, 0, NO_PEER, BarrierOptions(), call)

    # Names of the methods above since torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)

    # Methods that torch calls on every group. It stores names itself only for groups with C++ backends.

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """Do nothing: `destroy_group` destroys the inner group."""

    def abort(self) -> None:
        """Do nothing: `destroy_group` destroys the inner group."""


@dataclass(frozen=True)
class Wrapping:
    """Function that makes a group, passed through torch as the backend's options."""

    make: Callable[[], DelegatingGroup]


def wrapped_group(
    ranks: Sequence[int],
    inner: dist.ProcessGroup,
    timeout: timedelta,
    make: Callable[[], DelegatingGroup],
    new_group: NewGroup = dist.new_group,
) -> dist.ProcessGroup:
    """Create a group of ranks of the world around their inner group; every rank calls this, as with `new_group`."""
    group = new_group(list(ranks), backend=BACKEND, timeout=timeout, pg_options=Wrapping(make))
    if isinstance(group, DelegatingGroup):
        # `get_backend` must return the backend of the inner group: torch itself depends on it.
        groups = distributed_c10d._world.pg_map
        groups[group] = (groups[inner][0], groups[group][1])
    return group


def inner_groups(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Return the group and all groups inside it, the innermost last."""
    found = [group]
    while isinstance(found[-1], DelegatingGroup):
        found.append(found[-1].inner)
    return found


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group and all groups inside it."""
    for one in inner_groups(group):
        dist.destroy_process_group(one)


def _create(_: Any, wrapping: Wrapping) -> DelegatingGroup:
    return wrapping.make()


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the size of tensors."""
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
    return size


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
