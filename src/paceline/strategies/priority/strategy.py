"""`priority`: gradients of the first layers go first, and the next forward begins while the others still travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.sender import Sender, Slice
from paceline.config.specs import check_positive
from paceline.errors import WorkloadError
from paceline.plans.buckets import MIB
from paceline.plans.priority import blocks, schedule, slices
from paceline.strategies.base.overlapped import Bucket, Overlapped, Slot
from paceline.strategies.base.strategy import State
from paceline.strategies.priority.deferred_update import can_defer, defer, release
from paceline.strategies.priority.first_use import FirstUses, can_watch

_UNSEEN = "use bucketed: code that takes weights past the functions of torch cannot be made to wait for them"


@dataclass(frozen=True, kw_only=True)
class PriorityOptions:
    """What travels at once."""

    slice_mb: float = 4.0
    """About how many MiB a slice has: small ones let urgent ones pass sooner, large ones cost less processor time."""
    window: int = 3
    """How many slices may be under way at the same time: more fill the wire where hosts are busy computing, fewer let
    urgent ones pass sooner."""

    def __post_init__(self) -> None:
        check_positive("priority", self, "slice_mb", "window")


class Priority(Overlapped):
    """Gradients are cut into slices, those of the first layers go first; the next forward waits layer by layer.

    Idea
        Backward has the last layer's gradient first, forward needs the first layer's first. `ddp` sends gradients as
        they come and waits for all of them before the next step. Here `step` returns at once. A thread of its own
        sends slices, and of those that backward has filled the one that forward needs first. When forward comes to
        a layer, it waits for that layer's slices alone, then the optimiser steps that layer alone. So gradients travel
        behind forward as well as backward. Whoever else reads a weight, in any order, has it updated first too. Gloo
        sends first in, first out, so the thread hands over few slices at a time. Ranks must start the same slices in
        the same order: they agree on one, made of when each had its slices full (the latest counts) and how long
        slices take, after the first steps and ever more seldom then.

    Who sends what to whom (time runs to the right; ▒ is waiting, u the update, in `priority` layer by layer in forward)
        ddp        [bwd 4][bwd 3][bwd 2][bwd 1]▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒[u][fwd 1][fwd 2][fwd 3][fwd 4][bwd 4]
          the wire        [    layer 4     ][ layer 3  ][ 2  ][1]
        priority   [bwd 4][bwd 3][bwd 2][bwd 1]▒▒▒[fwd 1][fwd 2][fwd 3][fwd 4][bwd 4]
          the wire        [4][4][4][3][3][2][2][1][3][3][4][4][4]   each slice a ring of its own

    Cost
        The bytes of `ddp`, in more messages: per slice of m bytes 2(p−1)α + 2(p−1)/p·mβ + (p−1)/p·mγ. Where the wire
        never rests a step takes as long as the longer of computing and sending; what stays exposed are the first
        layers' slices, which only the end of backward makes and the next forward needs at once. Each block of layers
        (about a quarter of a slice, or one large layer) costs a call of the optimiser, some ten microseconds; each
        slice costs half a millisecond of processor time or more, which is why they are not smaller.

    When to use it
        On slow links between hosts, where `ddp` leaves much communication exposed, and above all for models that have
        most of their weights in their last layers; docs/results.md has such a case, with its conditions.

    When not
        On one host, or where communication hides behind backward already: the slices, the thread and the updates in
        parts only cost. With clipping (max_norm) the norm is known when all has arrived: it is right, but then nothing
        travels behind forward; nor does it in compiled and scripted models, which cannot be waited for layer by layer.
        Not with optimisers that look at more than one parameter at a time (LBFGS) or count steps for all of them; one
        that keeps gradients has to copy them, for the memory is filled anew in each step. A weight's update is made
        when a function of torch is given it: for memory that is read past them (an alias made before, a kernel of your
        own), and for other threads, put `with sync.agreed():` around what reads.

    Source
        Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys 2019.
        Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler),
        SOSP 2019.
    """

    name: ClassVar[str] = "priority"
    Options: ClassVar[type] = PriorityOptions

    _sender: Sender | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        self._parts: list[list[Slice]] = []
        self._slice_bytes = int(self.options.slice_mb * MIB)
        self._gates: list[RemovableHandle] = []
        self._first_uses: FirstUses | None = None
        self._settlers: list[Callable[[], None]] = []
        self._is_gated = False
        """Whether forward is known to wait for each parameter before its first use."""
        self._steps = 0
        self._is_sending = False
        """Whether a backward pass is filling the blocks."""
        self._settings: list[dict[str, Any]] = []
        """The optimiser's at the last step: a scheduler may have changed them before the update is made."""
        self._pending: set[int] = set()
        """Blocks that are on their way, or not yet given to the optimiser."""
        self._late: set[int] = set()
        """Those that still were when the next backward pass began."""
        super().wrap(model)
        self._order = None  # Of backward: not wanted here.
        if self.comm.world_size > 1:
            self._cut()
            self._sender = Sender(self.comm, self.options.window)
            parameters = [parameter for _, parameter in self.parameters]
            can_all_wait = can_watch(model) and all(map(can_defer, parameters))
            if can_all_wait and isinstance(self.optimizer, torch.optim.Optimizer):
                self._first_uses = FirstUses(model, parameters, self._set_gates)
        return model

    def step(self, max_norm: float | None = None) -> None:
        if self.comm.world_size == 1:
            super().step(max_norm)
            return
        self._begin_sending()
        self._used = self._complete()
        for _, parameter in self.parameters:
            parameter.grad = None
        self._expect_all()
        self._is_sending = False
        self._steps += 1
        self._pending = {block.number for block in self.buckets}
        if max_norm is not None or not self._is_gated or self._steps == 1:
            # The first time in any case: schedulers warn where they are stepped before the optimiser ever was.
            self._take_in(self._pending)
            self.update(max_norm)
        else:
            self.comm.mark_agreed()
            self._settings = [_settings(group) for group in self.optimizer.param_groups]
            for block, settle in zip(self.buckets, self._settlers, strict=True):
                for slot in block.slots:
                    defer(slot.parameter, settle)
        if _is_power_of_two(self._steps - 1):
            self._agree_on_order()

    def finish(self) -> None:
        self._settle(self._pending)

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
        for gate in self._gates:
            gate.remove()
        self._sender, self._first_uses = None, None
        self._gates, self._settlers, self._parts = [], [], []
        super().close()

    def launch(self, bucket: Bucket) -> None:
        assert self._sender is not None
        self._sender.mark_ready(self._parts[bucket.number])

    def arrive(self, bucket: Bucket) -> None:
        assert self._sender is not None
        self._sender.wait(self._parts[bucket.number])

    def packed(self, sizes: Sequence[int], kinds: Sequence[Any]) -> list[list[int]]:
        # They come in the order of backward.
        last = len(sizes) - 1
        in_order = blocks(list(reversed(sizes)), list(reversed(kinds)), self._slice_bytes)
        return [[last - place for place in block] for block in in_order]

    def _cut(self) -> None:
        """Cuts blocks into slices; at first they go in the order of backward."""
        for block in self.buckets:
            spans = slices(block.flat.numel(), block.flat.element_size(), self._slice_bytes)
            self._parts.append([Slice(block.flat[start:end]) for start, end in spans])
        self._in_turn = [part for parts in reversed(self._parts) for part in parts]
        self._needed = list(range(len(self.buckets)))

    # Backward: blocks fill, the sender sends.

    def _fill(self, slot: Slot, gradient: Tensor) -> None:
        self._begin_sending()
        if slot.bucket.number in self._late:
            raise _used_unseen(slot)
        super()._fill(slot, gradient)

    def _count(self, bucket: Bucket) -> None:
        bucket.missing -= 1
        if not bucket.missing:
            self.launch(bucket)

    def _begin_sending(self) -> None:
        """Before the first gradient of a step: blocks that no forward pass came to are still to be updated."""
        if self._is_sending:
            return
        assert self._sender is not None
        self._late = set(self._pending)
        self.finish()
        if _is_power_of_two(self._steps):
            self._figures = self._measure()
        self._sender.start_round(self._in_turn, timed=_is_power_of_two(self._steps + 1))
        self._is_sending = True

    # Forward: layer by layer, what has arrived becomes an update.

    def _set_gates(self, uses: dict[int, nn.Module]) -> None:
        """Has forward wait for a block where the first of its parameters is used; at its start where none was seen.

        Weights would wait by themselves. But so those that nothing of torch reads are waited for too, and what
        forward calls, as compiled functions, meets plain parameters.
        """
        behind: dict[nn.Module, set[int]] = {}
        for position, slot in enumerate(self._slots):
            behind.setdefault(uses.get(position, self.model), set()).add(slot.bucket.number)
        for module, numbers in behind.items():
            self._gates.append(module.register_forward_pre_hook(self._gate(numbers), prepend=True))
        places = {position: place for place, position in enumerate(uses, start=1)}
        needed = dict.fromkeys(range(len(self.buckets)), len(places) + 1)
        for position, slot in enumerate(self._slots):
            needed[slot.bucket.number] = min(needed[slot.bucket.number], places.get(position, 0))
        self._needed = list(needed.values())
        self._settlers = [self._settler(block.number) for block in self.buckets]
        self._is_gated = True

    def _gate(self, numbers: set[int]) -> Callable[[nn.Module, Any], None]:
        def gate(_: nn.Module, __: Any) -> None:
            if self._pending:
                self._settle(numbers & self._pending)

        undisturbed: Callable[[nn.Module, Any], None] = torch.compiler.disable(gate)
        return undisturbed

    def _settler(self, number: int) -> Callable[[], None]:
        """Settles a block for whoever reads one of its weights: it need not be forward, nor in the usual order."""
        settle: Callable[[], None] = torch.compiler.disable(lambda: self._settle({number}))
        return settle

    def _settle(self, numbers: Iterable[int]) -> None:
        """Waits for some blocks, and lets the optimiser step their parameters alone."""
        taken = self._take_in(numbers)
        groups = self._groups_of({id(slot.parameter) for slot in taken}) if taken else []
        if not groups:
            return
        whole, self.optimizer.param_groups = self.optimizer.param_groups, groups
        before, self.updating = self.updating, self._steps
        try:
            # Forward may be one of half precision, or one that nobody wants gradients of.
            with torch.inference_mode(False), torch.autocast(self.comm.device.type, enabled=False):
                self.optimizer.step()
        finally:
            self.optimizer.param_groups = whole
            self.updating = before
            for slot in taken:
                slot.parameter.grad = None

    def _take_in(self, numbers: Iterable[int]) -> list[Slot]:
        """Waits for some blocks, and gives their parameters the gradients; returns those that have one."""
        due = [self.buckets[number] for number in sorted(numbers)]
        if not due:
            return []
        with self.comm.idle():
            for block in due:
                self.arrive(block)
        self._pending = self._pending - {block.number for block in due}
        used = {slot.name for slot, is_used in zip(self._slots, self._used, strict=True) if is_used}
        taken = [slot for block in due for slot in block.slots if slot.name in used]
        for slot in (slot for block in due for slot in block.slots):
            release(slot.parameter)
            if slot.parameter.grad is not None:
                raise _used_unseen(slot)
        for slot in taken:
            slot.parameter.grad = slot.view
        return taken

    def _groups_of(self, wanted: set[int]) -> list[dict[str, Any]]:
        """The optimiser's groups with some of their parameters alone, and as they were set at the last step."""
        found = []
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=False):
            places = [place for place, parameter in enumerate(group["params"]) if id(parameter) in wanted]
            if places:
                lists = {key: [group[key][place] for place in places] for key in _LISTS if key in group}
                found.append({**settings, **lists})
        return found

    # The order of slices.

    def _measure(self) -> list[float]:
        """Of the last step: when each block was full, after the first was, and how long anything was on the wire."""
        first_s = min(parts[0].ready_s for parts in self._parts)
        busy_s, until_s = 0.0, 0.0
        for part in self._in_turn:
            busy_s += max(0.0, part.end_s - max(part.start_s, until_s))
            until_s = max(until_s, part.end_s)
        return [*(parts[0].ready_s - first_s for parts in self._parts), busy_s]

    def _agree_on_order(self) -> None:
        """Of the slices that are ready on all ranks, the one that forward needs first comes next."""
        everyone = self.comm.gather(torch.tensor([*self._figures, *self._needed], dtype=torch.float64))
        count = len(self.buckets)
        ready_s = torch.stack(everyone)[:, :count].amax(0).tolist()
        busy_s = min(float(own[count]) for own in everyone)
        needed = everyone[0][count + 1 :].tolist()
        parts = [(number, part) for number, parts in enumerate(self._parts) for part in parts]
        sizes = [part.flat.nbytes for _, part in parts]
        order = schedule(
            [ready_s[number] for number, _ in parts],
            [needed[number] for number, _ in parts],
            sizes,
            busy_s / sum(sizes),
        )
        self._in_turn = [parts[place][1] for place in order]


def _used_unseen(slot: Slot) -> WorkloadError:
    """The error for a weight that has a new gradient before its last update."""
    return WorkloadError(f"{slot.name} was used before its last update.", hint=_UNSEEN)


_LISTS = ("params", "param_names")
"""What a group of an optimiser has for each of its parameters."""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings; schedulers may change those that are tensors in place."""
    kept = {key: value for key, value in group.items() if key not in _LISTS}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.items()}


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
