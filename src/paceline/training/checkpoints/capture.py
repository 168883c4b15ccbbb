"""State of a run: gathered from all ranks for a checkpoint, and given back to all of them from one.

Rank 0 alone reads and writes files, so hosts need no shared disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.comm.messages.json_messages import gather_typed
from paceline.comm.messages.nested import NestedMessage, receive_nested
from paceline.errors import CheckpointError
from paceline.formatting import join_names, plural
from paceline.records.checkpoint import RandomStateInfo
from paceline.strategies.base.optimizer_state import IMPLEMENTATION
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.storage.contents import KEPT_HINT, ParamGroups
from paceline.training.sync import Sync
from paceline.workloads.random_state import random_state_info, restore_random_state

NAMES = "names"
"""Key of the names of a group's parameters, in place of the parameters."""
BUFFERS, STRATEGY = "buffers", "strategy"
"""Parts of the state of one rank: its own buffers, and what its strategy keeps."""


@dataclass(frozen=True)
class Captured:
    """State of a run. The model and the optimiser are complete on rank 0 only; their tensors are those in use."""

    state: State
    param_groups: list[dict[str, Any]]
    random: list[RandomStateInfo]


def capture(sync: Sync, *, keeps_own_buffers: bool) -> Captured:
    """Return the state of a run; called on every rank, between two steps.

    With `keeps_own_buffers`, ranks have different running statistics, and each keeps its own.
    """
    own: dict[str, Any] = {}
    buffers = {name: buffer.detach() for name, buffer in sync.strategy.model.named_buffers()}
    if keeps_own_buffers and buffers:
        own[BUFFERS] = buffers
    with sync.agreed():
        state = sync.strategy.state()
    if state.per_rank:
        own[STRATEGY] = state.per_rank
    per_rank = _gather_to_rank_0(own, sync)
    return Captured(
        state=State(state.model, state.optimizer, per_rank),
        param_groups=param_groups_of(sync),
        random=gather_typed(random_state_info(sync.comm.device), RandomStateInfo, sync.comm.control),
    )


def param_groups_of(sync: Sync) -> list[dict[str, Any]]:
    """Return the settings of the optimiser's parameter groups, but for the choice of an implementation.

    That depends on the device: Adam with `capturable` fails on a CPU, and without it cannot be captured on a GPU.
    """
    names = {id(parameter): name for name, parameter in sync.strategy.parameters}
    return [
        {key: value for key, value in group.items() if key != "params" and key not in IMPLEMENTATION}
        | {NAMES: [names.get(id(parameter), "") for parameter in group["params"]]}
        for group in sync.optimizer.param_groups
    ]


def load_param_groups(sync: Sync, groups: ParamGroups) -> list[str]:
    """Set the optimiser's settings to kept ones; return what could not be used, in words."""
    present = param_groups_of(sync)
    if [group[NAMES] for group in groups] != [group[NAMES] for group in present]:
        return ["the settings of the optimiser, because its parameter groups are others"]
    for group, kept in zip(sync.optimizer.param_groups, groups, strict=True):
        for key, value in kept.items():
            if key == NAMES or key in IMPLEMENTATION:  # Checkpoints of earlier versions have the latter.
                continue
            if isinstance(group.get(key), Tensor):  # A learning rate on a GPU stays the tensor that graphs read.
                group[key].fill_(value) if not isinstance(value, Tensor) else group[key].copy_(value)
            else:
                group[key] = value
    return []


def load_state(sync: Sync, state: State, random: list[RandomStateInfo], *, ranks: int) -> list[str]:
    """Continue from a state of `ranks` ranks, under any strategy; return what could not be used, in words.

    Called on every rank with the same arguments.
    """
    check_model_fits(sync, state.model)
    comm = sync.comm
    same_ranks = ranks == comm.world_size
    own: Mapping[str, Any] = state.per_rank.get(str(comm.rank), {}) if same_ranks else {}
    lost = sync.strategy.load(State(state.model, state.optimizer, own.get(STRATEGY, {})))
    kept = {part for one in state.per_rank.values() for part in one}
    if not same_ranks and STRATEGY in kept:
        lost.append(f"what the strategy kept on each of {plural(ranks, 'rank')}")
    if BUFFERS in own:
        buffers = dict(sync.strategy.model.named_buffers())
        for name, value in own[BUFFERS].items():
            if name in buffers and buffers[name].shape == value.shape:
                buffers[name].detach().copy_(value)
    elif BUFFERS in kept:
        lost.append("the running statistics of other ranks than rank 0, because the number of ranks is another")
    if comm.rank < len(random):
        try:
            restore_random_state(random[comm.rank], comm.device)
        except ValueError as error:
            lost.append(f"random numbers: {error}")
    return lost


def check_model_fits(sync: Sync, saved: Mapping[str, Any]) -> None:
    """Raise if the tensors of a checkpoint are not those of the model."""
    present = sync.strategy.model.state_dict()
    for found, where in (
        (present.keys() - saved.keys(), "the checkpoint lacks"),
        (saved.keys() - present.keys(), "the model lacks"),
    ):
        if found:
            names = sorted(found)
            shown = join_names(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(f"the checkpoint is of another model: {where} {shown}.", hint=_MODEL_HINT)
    for name, tensor in present.items():
        if isinstance(tensor, Tensor) and tensor.shape != saved[name].shape:
            shapes = [tuple(one.shape) for one in (saved[name], tensor)]
            raise CheckpointError(
                f"the checkpoint is of another model: {name} has shape {shapes[0]} there and {shapes[1]} here.",
                hint=_MODEL_HINT,
            )


_MODEL_HINT = "resume with the workload that wrote the checkpoint"


def _gather_to_rank_0(own: dict[str, Any], sync: Sync) -> dict[str, Any]:
    """Return what each rank keeps, by rank, on rank 0; empty if no rank keeps anything."""
    comm = sync.comm
    if not comm.control.largest(float(bool(own))):
        return {}
    if comm.rank:
        NestedMessage(own, f"the state of rank {comm.rank}", KEPT_HINT).send(0, comm.control.group)
        return {}
    return {"0": own} | {
        str(rank): receive_nested(rank, comm.control.group, None) for rank in range(1, comm.world_size)
    }
