"""`priority`: gradients of the first layers are sent first; the next forward starts while the others are sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

from paceline.comm.sender import Sender, Slice
from paceline.config.specs import check_positive
from paceline.errors import WorkloadError
from paceline.plans.buckets import MIB
from paceline.plans.priority import blocks, schedule, slices
from paceline.strategies.base.overlapped import Bucket, Overlapped, Slot, changed_gradient_error
from paceline.strategies.base.parameter_groups import PER_PARAMETER_KEYS
from paceline.strategies.base.scaling import scaler_argument
from paceline.strategies.base.strategy import State
from paceline.strategies.base.uncopied_hook import UncopiedHook
from paceline.strategies.priority.deferred_update import can_defer, defer, release
from paceline.strategies.priority.first_use import FirstUses, can_record
from paceline.strategies.priority.optimizer_numbers import changed_number, numbers_of

_SAMPLE_ITEMS = 4096
"""Largest gradient that is read back to detect changes, in numbers; reading this many takes a few microseconds."""
_UNSEEN_HINT = "use bucketed, which updates all weights before step() returns"
_WHOLE_STEP_HINT = "use bucketed, which steps the optimiser once for all parameters"


@dataclass(frozen=True, kw_only=True)
class PriorityOptions:
    """Size and number of slices."""

    slice_mb: float = 4.0
    """Approximate slice size in MiB. Small slices let urgent ones overtake sooner; large ones use less CPU time."""
    window: int = 3
    """Number of slices sent at the same time. More keep the network busy; fewer let urgent ones overtake sooner."""

    def __post_init__(self) -> None:
        check_positive("priority", self, "slice_mb", "window")


class Priority(Overlapped):
    """Slices of gradients are sent by priority, first layers first; the next forward waits layer by layer.

    Idea
        Backward computes the last layer's gradient first, but forward needs the first layer's weights first. `ddp`
        sends gradients in the order of backward and waits for all of them before the next step. Here, `step` returns at
        once. A separate thread sends slices of gradients: of those that backward has filled, the one that forward needs
        first. Before forward runs a layer, it waits only for that layer's slices, and the optimiser steps only that
        layer. So communication overlaps with the next forward as well as with backward. Other code that reads a weight
        also gets the updated value, in any order. Gloo sends slices in the order in which it receives them, so the
        thread passes it only a few at a time. All ranks must send slices in the same order. After steps 2, 3, 5, 9, 17
        and so on, they agree on a new order, from the times at which slices were full (on the slowest rank) and the
        time that sending took.

    Who sends what to whom (time runs to the right; ▒ is waiting, u the update; `priority` updates layers in forward)
        ddp        [bwd 4][bwd 3][bwd 2][bwd 1]▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒[u][fwd 1][fwd 2][fwd 3][fwd 4][bwd 4]
          network         [    layer 4     ][ layer 3  ][ 2  ][1]
        priority   [bwd 4][bwd 3][bwd 2][bwd 1]▒▒▒[fwd 1][fwd 2][fwd 3][fwd 4][bwd 4]
          network         [4][4][4][3][3][2][2][1][3][3][4][4][4]   each slice is one all-reduce

    Cost
        As many bytes as `ddp`, in more messages: 2(p−1)α + 2(p−1)/p·mβ + (p−1)/p·mγ per slice of m bytes. If the
        network is always busy, a step takes as long as the longer of computing and sending. The slices of the first
        layers remain exposed: they are ready only at the end of backward, and the next forward needs them at once. Each
        block of layers (about a quarter of a slice, or one large layer) costs one call of the optimiser, about ten
        microseconds. Each slice costs at least half a millisecond of CPU time: smaller slices cost more than they save.

    When to use it
        On slow links between hosts, where `ddp` leaves much communication exposed, above all for models that have most
        of their weights in the last layers; docs/results.md has such a case, with its conditions.

    When not to use it
        On one host, or if communication is already hidden behind backward: slices, thread and partial updates then
        only add cost. With clipping (max_norm), the norm is known only when all gradients have arrived: the result is
        correct, but nothing overlaps with forward. The same holds for compiled and scripted models, which cannot wait
        layer by layer. Not for training loops that change gradients between backward and `step`: they have been sent by
        then. `step` raises an error for changes that move PyTorch's version counters; changes through `.grad.data` may
        be lost. Not with optimisers that use more than one parameter at a time, such as one that divides by the norm of
        all gradients; optimisers that count steps for all parameters together are refused. Code that keeps a
        gradient after `step` must copy it, because the next step overwrites the memory. A weight is updated when a
        function of torch receives it, and all weights are before `optimizer.state_dict()`. Code that reads memory in
        another way (an alias made before, your own kernel, `optimizer.state`) or in another thread must be inside
        `with sync.agreed():`.

    Source
        Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys 2019.
        Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler),
        SOSP 2019.
    """

    name: ClassVar[str] = "priority"
    sends = "overlapped_forward"
    agrees_in_backward = False
    Options: ClassVar[type] = PriorityOptions

    _sender: Sender | None = None
    _partial_update_step: int | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        self._block_slices: list[list[Slice]] = []
        """Slices of each block."""
        self._slice_bytes = int(self.options.slice_mb * MIB)
        self._wait_hooks: list[RemovableHandle] = []
        self._first_uses: FirstUses | None = None
        self._updaters: list[Callable[[], None]] = []
        self._has_wait_hooks = False
        """Whether hooks make forward wait for each parameter before its first use."""
        self._steps = 0
        self._is_sending = False
        """Whether the sender is open for the slices of the current step."""
        self._settings: list[dict[str, Any]] = []
        """Settings of the optimiser at the last step; a scheduler may change them before a deferred update."""
        self._pending: set[int] = set()
        """Blocks of the last step that the optimiser has not stepped yet."""
        self._pending_at_backward: set[int] = set()
        """Blocks that were still pending when the next backward pass started."""
        self._number_changed: str | None = None
        """Number that the optimiser keeps for all parameters together and changes in its step; None if unknown."""
        self._sample: tuple[Slot, float] | None = None
        """A small gradient of this step, and its largest absolute value when it was put into its block."""
        super().wrap(model)
        self._order = None  # Blocks keep the order of forward.
        if self.comm.world_size > 1:
            self._cut_blocks()
            self._sender = Sender(self.comm, self.options.window)
            parameters = [parameter for _, parameter in self.parameters]
            if can_record(model) and all(map(can_defer, parameters)):
                import_module("torch._dynamo")  # Which hooks, made in the first step, are excluded from.
                self._first_uses = FirstUses(model, parameters, self._set_wait_hooks)
                self._finish_before_states(self.optimizer)
        return model

    def _finish_before_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply deferred updates before the optimiser's state is saved or replaced: it would be one update older."""
        self._wait_hooks.append(optimizer.register_state_dict_pre_hook(lambda _: self.finish()))
        self._wait_hooks.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish()))

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        if self.comm.world_size == 1:
            super().step(max_norm, scaler)
            return
        self._begin_sending()
        self._used = self._complete_buckets()
        for _, parameter in self.parameters:
            parameter.grad = None
        self._reset_buckets()
        self._is_sending = False
        self._steps += 1
        self._pending = {block.number for block in self.buckets}
        if max_norm is not None or scaler is not None or not self._has_wait_hooks or self._steps == 1:
            # Always in the first step: schedulers warn if they are stepped before the optimiser was.
            self._receive_gradients(self._pending)
            self._update_whole(max_norm, scaler)
        else:
            if self._number_changed is not None:
                raise _number_error(self._number_changed)
            self._settings = [_settings(group) for group in self.optimizer.param_groups]
            for block, apply_update in zip(self.buckets, self._updaters, strict=True):
                for slot in block.slots:
                    defer(slot.parameter, apply_update)
        if _is_power_of_two(self._steps - 1):
            self._agree_on_order()

    def _update_whole(self, max_norm: float | None, scaler: GradScaler | None) -> None:
        """Step the optimiser on all parameters, and check whether it may be stepped in parts."""
        if not self._has_wait_hooks or self._number_changed is not None:
            self.update(max_norm, **scaler_argument(scaler))
            return
        before = numbers_of(self.optimizer)
        self.update(max_norm, **scaler_argument(scaler))
        self._number_changed = changed_number(before, numbers_of(self.optimizer))

    def finish(self) -> None:
        self._update_blocks(self._pending)

    def partial_update_step(self) -> int | None:
        """Return the number of the step while the optimiser updates some of its blocks."""
        return self._partial_update_step

    def load(self, state: State) -> list[str]:
        self.finish()
        return super().load(state)

    def close(self) -> None:
        try:
            if self._sender is not None and not self._sender.has_raised:
                self.finish()
        finally:
            self.abandon()

    def abandon(self) -> None:
        for slot in self._slots:
            release(slot.parameter)
        if self._sender is not None:
            self._sender.close()
        if self._first_uses is not None:
            self._first_uses.close()
        for hook in self._wait_hooks:
            hook.remove()
        self._sender, self._first_uses = None, None
        self._wait_hooks, self._updaters, self._block_slices = [], [], []
        super().close()

    def launch(self, bucket: Bucket) -> None:
        assert self._sender is not None
        self._sender.mark_ready(self._block_slices[bucket.number])

    def wait(self, bucket: Bucket) -> None:
        assert self._sender is not None
        self._sender.wait(self._block_slices[bucket.number])

    def assign_buckets(self, sizes: Sequence[int], kinds: Sequence[Any]) -> list[list[int]]:
        # The sizes are in the order of backward, blocks in the order of forward.
        last = len(sizes) - 1
        in_forward_order = blocks(list(reversed(sizes)), list(reversed(kinds)), self._slice_bytes)
        return [[last - index for index in block] for block in in_forward_order]

    def _cut_blocks(self) -> None:
        """Cut blocks into slices; in the first steps these are sent in the order of backward."""
        for block in self.buckets:
            spans = slices(block.flat.numel(), block.flat.element_size(), self._slice_bytes)
            self._block_slices.append([Slice(block.flat[start:end]) for start, end in spans])
        self._send_order = [one for parts in reversed(self._block_slices) for one in parts]
        self._needed = list(range(len(self.buckets)))
        """Position of each block in the order in which forward needs the blocks."""

    # Backward: hooks fill the blocks, the sender's thread sends their slices.

    def _add_gradient(self, slot: Slot, gradient: Tensor) -> None:
        self._begin_sending()
        if slot.bucket.number in self._pending_at_backward:
            raise _used_before_update_error(slot)
        super()._add_gradient(slot, gradient)
        if self._sample is None and 0 < gradient.numel() <= _SAMPLE_ITEMS and gradient.device.type == "cpu":
            self._sample = slot, _max_abs(gradient)

    def _check_unchanged(self) -> None:
        super()._check_unchanged()
        if self._sample is not None:
            # GradScaler changes all gradients without moving PyTorch's version counters, so one value is compared.
            slot, before = self._sample
            assert slot.gradient is not None
            if _max_abs(slot.gradient) != before and not math.isnan(before):
                raise changed_gradient_error(slot)

    def _reset_buckets(self) -> None:
        super()._reset_buckets()
        self._sample = None

    def _count_gradient(self, bucket: Bucket) -> None:
        bucket.missing -= 1
        if not bucket.missing:
            self.launch(bucket)

    def _begin_sending(self) -> None:
        """Open the sender before the first gradient of a step; first update blocks that forward did not use."""
        if self._is_sending:
            return
        assert self._sender is not None
        self._pending_at_backward = set(self._pending)
        self.finish()
        if _is_power_of_two(self._steps):
            self._timings = self._measure_last_step()
        self._sender.start_round(self._send_order, timed=_is_power_of_two(self._steps + 1))
        self._is_sending = True

    # Forward: before each layer, wait for its gradients and update it.

    def _set_wait_hooks(self, uses: dict[int, nn.Module]) -> None:
        """Add hooks that make forward wait for a block before the module that first uses one of its parameters.

        For a parameter whose use was not recorded, forward waits at its start. Deferred parameters would also wait by
        themselves. The hooks are needed for weights that no function of torch reads, and so that compiled functions
        that forward calls receive plain parameters.
        """
        blocks_of: dict[nn.Module, set[int]] = {}
        for position, slot in enumerate(self._slots):
            blocks_of.setdefault(uses.get(position, self.model), set()).add(slot.bucket.number)
        for module, numbers in blocks_of.items():
            self._wait_hooks.append(module.register_forward_pre_hook(self._make_wait_hook(numbers), prepend=True))
        order_of_use = {position: order for order, position in enumerate(uses, start=1)}
        needed = dict.fromkeys(range(len(self.buckets)), len(order_of_use) + 1)
        for position, slot in enumerate(self._slots):
            needed[slot.bucket.number] = min(needed[slot.bucket.number], order_of_use.get(position, 0))
        self._needed = list(needed.values())
        self._updaters = [self._make_updater(block.number) for block in self.buckets]
        self._has_wait_hooks = True

    def _make_wait_hook(self, numbers: set[int]) -> Callable[[nn.Module, Any], None]:
        def wait_and_update(_: nn.Module, __: Any) -> None:
            if self._pending:
                self._update_blocks(numbers & self._pending)

        return UncopiedHook(torch.compiler.disable(wait_and_update))

    def _make_updater(self, number: int) -> Callable[[], None]:
        """Return a function that updates a block; it runs when any code reads one of the block's weights."""
        update: Callable[[], None] = torch.compiler.disable(lambda: self._update_blocks({number}))
        return update

    def _update_blocks(self, numbers: Iterable[int]) -> None:
        """Wait for the gradients of some blocks, and step the optimiser on their parameters only."""
        taken = self._receive_gradients(numbers)
        groups = self._groups_of({id(slot.parameter) for slot in taken}) if taken else []
        self.report_mean([slot.view for slot in taken])
        try:
            if groups:  # The user's optimiser may have none of these parameters.
                self._step_groups(groups)
        finally:
            for slot in taken:
                slot.parameter.grad = None

    def _step_groups(self, groups: list[dict[str, Any]]) -> None:
        """Step the optimiser with other parameter groups than its own; raise if it counts for all of them together."""
        all_groups, self.optimizer.param_groups = self.optimizer.param_groups, groups
        before, self._partial_update_step = self._partial_update_step, self._steps
        numbers = numbers_of(self.optimizer)
        try:
            # Forward may run in half precision, or in inference mode.
            with torch.inference_mode(False), torch.autocast(self.comm.device.type, enabled=False):
                self.optimizer.step()
            self._number_changed = changed_number(numbers, numbers_of(self.optimizer))
        finally:
            self.optimizer.param_groups = all_groups
            self._partial_update_step = before
        if self._number_changed is not None:
            raise _number_error(self._number_changed)

    def _receive_gradients(self, numbers: Iterable[int]) -> list[Slot]:
        """Wait for some blocks and set their parameters' gradients; return the slots that have one."""
        due = [self.buckets[number] for number in sorted(numbers)]
        if not due:
            return []
        with self.comm.idle():
            for block in due:
                self.wait(block)
        self._pending = self._pending - {block.number for block in due}
        used = {slot.name for slot, is_used in zip(self._slots, self._used, strict=True) if is_used}
        taken = [slot for block in due for slot in block.slots if slot.name in used]
        for slot in (slot for block in due for slot in block.slots):
            release(slot.parameter)
            if slot.parameter.grad is not None:
                raise _used_before_update_error(slot)
        for slot in taken:
            slot.parameter.grad = slot.view
        return taken

    def _groups_of(self, wanted: set[int]) -> list[dict[str, Any]]:
        """Return the optimiser's groups with only the wanted parameters (by id), and the settings of the last step."""
        found = []
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=False):
            indices = [index for index, parameter in enumerate(group["params"]) if id(parameter) in wanted]
            if indices:
                lists = {key: [group[key][index] for index in indices] for key in PER_PARAMETER_KEYS if key in group}
                found.append({**settings, **lists})
        return found

    # The order of slices.

    def _measure_last_step(self) -> list[float]:
        """Return, for the last step, seconds from the first full block to each block, then seconds of sending."""
        first_s = min(parts[0].ready_s for parts in self._block_slices)
        busy_s, until_s = 0.0, 0.0
        for one in self._send_order:
            busy_s += max(0.0, one.end_s - max(one.start_s, until_s))
            until_s = max(until_s, one.end_s)
        return [*(parts[0].ready_s - first_s for parts in self._block_slices), busy_s]

    def _agree_on_order(self) -> None:
        """Set the order of slices, the same on all ranks: of those ready on all, the one that forward needs first."""
        everyone = self.comm.control.gather(torch.tensor([*self._timings, *self._needed], dtype=torch.float64))
        count = len(self.buckets)
        ready_s = torch.stack(everyone)[:, :count].amax(0).tolist()
        busy_s = min(float(own[count]) for own in everyone)
        needed = everyone[0][count + 1 :].tolist()
        numbered = [(number, one) for number, parts in enumerate(self._block_slices) for one in parts]
        sizes = [one.flat.nbytes for _, one in numbered]
        order = schedule(
            [ready_s[number] for number, _ in numbered],
            [needed[number] for number, _ in numbered],
            sizes,
            busy_s / sum(sizes),
        )
        self._send_order = [numbered[index][1] for index in order]


def _used_before_update_error(slot: Slot) -> WorkloadError:
    """Return the error for a weight that got a new gradient before its last update."""
    return WorkloadError(
        f"{slot.name} was used before its last update, by code that bypasses torch functions.", hint=_UNSEEN_HINT
    )


def _number_error(name: str) -> WorkloadError:
    """Return the error for an optimiser that changes a number which it keeps for all parameters together."""
    return WorkloadError(
        f"the optimiser changes {name} in its step, and priority would call the step several times with copies of the "
        "parameter groups.",
        hint=_WHOLE_STEP_HINT,
    )


def _max_abs(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.detach(), torch.inf))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's settings; tensors are cloned because schedulers may change them in place."""
    kept = {key: value for key, value in group.items() if key not in PER_PARAMETER_KEYS}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.items()}


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
