"""Checked process group: compares every operation with those of the other ranks before it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.groups.collective_check import Call, CollectiveCheck
from paceline.comm.groups.delegating import DelegatingGroup, wrapped_group
from paceline.comm.groups.local import NewGroup
from paceline.measure.activity import ACTIVITY
from paceline.records.timeline import NO_PEER, RowKind
from paceline.user_code import is_of_library

_COMM_FOLDER = str(Path(__file__).parent.parent)
_COMPARED_ARGUMENTS = {
    RowKind.ALL_REDUCE: 0,
    RowKind.BROADCAST: 0,
    RowKind.REDUCE: 0,
    RowKind.SCATTER: 0,
    RowKind.REDUCE_SCATTER: 0,
    RowKind.GATHER: 1,
    RowKind.ALL_GATHER: 1,
}
"""Argument of each collective whose tensors all ranks must have alike; sizes of all_to_all may differ."""


class CheckedGroup(DelegatingGroup):
    """A process group that compares each operation with those of the other ranks, and runs it on an inner group."""

    def __init__(self, inner: dist.ProcessGroup, check: CollectiveCheck, members: Sequence[int]) -> None:
        super().__init__(inner, members)
        self._check = check

    def _run(
        self,
        kind: RowKind,
        size: int,  # noqa: ARG002
        peer: int,
        opts: Any,
        call: Callable[..., dist.Work | None],
        *arguments: Any,
    ) -> dist.Work | None:
        compared = _COMPARED_ARGUMENTS.get(kind)
        tensors = [] if compared is None else arguments[compared]
        root = [] if peer == NO_PEER else [f"root {self._member(peer)}"]
        detail = ", ".join([*_reduction_of(opts), *root])
        own = self._call(kind, [tensors] if isinstance(tensors, Tensor) else tensors, detail)
        self._check.collective(self.inner.group_name, len(self._members), own)
        return call(*arguments, opts)

    def _message(
        self, kind: RowKind, peer: int, call: Callable[..., dist.Work], tensors: list[Tensor], *arguments: Any
    ) -> dist.Work:
        if peer != NO_PEER:
            own, other = self._member(self.rank()), self._member(peer)
            ends = (own, other) if kind is RowKind.SEND else (other, own)
            tag = arguments[-1]
            self._check.message(self.inner.group_name, *ends, tag, self._call(kind, tensors, ""))
        return call(tensors, *arguments)

    def _call(self, kind: RowKind, tensors: Sequence[Tensor], detail: str) -> Call:
        return Call(
            rank=self._member(self.rank()),
            kind=kind.title,
            shapes=[list(tensor.shape) for tensor in tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            detail=detail,
            place=_place(),
            step=ACTIVITY.step,
        )


def checked_group(
    ranks: Sequence[int],
    inner: dist.ProcessGroup,
    timeout: timedelta,
    check: CollectiveCheck,
    members: Sequence[int] | None = None,
    new_group: NewGroup = dist.new_group,
) -> dist.ProcessGroup:
    """Create a checked group around the group of some ranks of the world; every rank calls this, as with `new_group`.

    `members` are the numbers of these ranks in the run, if they are not 0, 1, 2 and so on.
    """
    in_run = range(len(ranks)) if members is None else members
    return wrapped_group(ranks, inner, timeout, lambda: CheckedGroup(inner, check, in_run), new_group)


def _reduction_of(opts: Any) -> list[str]:
    """Return the name of the reduction in a collective's options, if they have one."""
    reduction = getattr(opts, "reduceOp", None)
    names = ReduceOp.RedOpType.__members__
    return [name.lower() for name, value in names.items() if reduction is not None and reduction == value]


def _place() -> str:
    """Return the innermost line outside of torch and of this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_of_library(file) and not file.startswith(_COMM_FOLDER):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
