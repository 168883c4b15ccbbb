"""State of an optimiser by parameter name: copies of it, and putting it into an optimiser.

`optimizer.load_state_dict` is not used: it casts all state but `step` to the dtype of the parameter, and gives it
another memory layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.comm.messages.nested_tensors import map_tensors, memory_key

STEP = "step"
"""Key of the step count, which torch's optimisers keep in main memory unless they are fused or capturable."""
IMPLEMENTATION = frozenset({"capturable", "foreach", "fused"})
"""Settings by which a group of torch's optimisers chooses its implementation for a device. They change no result."""


def clone_tensors(values: Any) -> Any:
    """Return nested values with each tensor cloned; tensors that share their memory do so in the clone too."""
    clones: dict[Any, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        key = memory_key(tensor)
        if key not in clones:
            clones[key] = tensor.detach().clone()
        return clones[key]

    return map_tensors(values, clone)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]],
    saved: Mapping[str, Mapping[str, Any]],
) -> None:
    """Replace the optimiser's state of some parameters with a copy of a saved one; parameters it lacks get none.

    Dtypes stay as they are. Tensors go to the device of their parameter, step counts to where torch keeps them, and a
    tensor of the shape of its parameter gets the memory layout of that.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    copies: dict[Any, Tensor] = {}
    for name, parameter in named_parameters:
        if not saved.get(name):
            optimizer.state.pop(parameter, None)
            continue
        group = groups.get(id(parameter), {})
        step_device = torch.device("cpu") if _counts_on_host(group) else parameter.device
        optimizer.state[parameter] = {
            key: _placed(value, parameter, step_device if key == STEP else parameter.device, copies)
            for key, value in saved[name].items()
        }


def _counts_on_host(group: Mapping[str, Any]) -> bool:
    """Return whether a group's step counts are in main memory. Those of optimisers that are not torch's are not."""
    is_of_torch = not IMPLEMENTATION.isdisjoint(group)
    return is_of_torch and not (group.get("fused") or group.get("capturable"))


def _placed(values: Any, parameter: Tensor, device: torch.device, copies: dict[Any, Tensor]) -> Any:
    """Return a copy of nested values on a device. `copies` has one of each tensor, which parameters may share."""

    def place(tensor: Tensor) -> Tensor:
        like = tensor.detach()
        if tensor.shape == parameter.shape:
            like = parameter.detach()
        key = (memory_key(tensor), device, like.stride())
        if key not in copies:
            copies[key] = torch.empty_like(like, dtype=tensor.dtype, device=device).copy_(tensor.detach())
        return copies[key]

    return map_tensors(values, place)
