"""Replica guard: ranks compare checksums of the weights that should be equal, and stop the run if they differ.

It compares all weights after steps 1, 2, 4, 8 and so on, in `agreed` and in `close`. Between these it compares as often
as `COST_SHARE` of the training time allows, of large models some tensors each time. In Paceline's loop this happens at
the ends of windows, when their clock has stopped: the first window with a power of two in it ends with a comparison. In
a user's loop it happens after steps that all ranks have agreed on in the comparison before. What is wrong on all ranks
alike it cannot see.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from paceline.analysis.replicas import difference_sentence
from paceline.comm.group import Comm
from paceline.errors import ReplicaError, is_peer_lost
from paceline.records.summary import ReplicaComparisons, ReplicaDifference
from paceline.strategies.base.strategy import Strategy
from paceline.training.batchnorm import SyncedBatchNorm
from paceline.training.replicas.checksums import checksums
from paceline.training.replicas.distance import TensorDifference, measure_differences

COST_SHARE = 0.001
"""Share of the training time that comparisons may take, besides those after steps 1, 2, 4, 8 and so on."""
ROUNDING = 1e-6
"""Largest distance, relative to the norm of a tensor, that rounding explains."""
_HINT = (
    "train through sync.model and sync.step() on every rank; a strategy of your own must synchronise every gradient "
    "(--check-collectives finds messages of different sizes, which Gloo accepts in silence); "
    'to train on, use --replica-guard warn (in your own training loop: attach(…, replica_guard="warn"))'
)
TURN_BYTES = 16 * 2**20
"""Bytes of a model that are compared at least, or all of a smaller one. Their checksums take one or two milliseconds on
one core, a few times as long as the exchange of the result."""


class ReplicaGuard:
    """Comparisons of the replicas of one run on one rank; every rank makes the same ones at the same steps."""

    def __init__(
        self,
        mode: Literal["stop", "warn"],
        strategy: Strategy,
        comm: Comm,
        *,
        compare_statistics: bool,
    ) -> None:
        self._mode = mode
        self._strategy = strategy
        self._comm = comm
        self._compare_statistics = compare_statistics
        """Whether running statistics should be equal too: BatchNorm layers normalise over all ranks."""
        self._by_windows = comm.stopwatch is not None
        """Whether steps are recorded, in windows; comparisons then follow the windows, not the steps."""
        self._steps = 0
        """Steps done with `Sync.step`."""
        self._next_power = 1
        """Power of two at or after which all weights are compared next."""
        self._next_step = self._whole_periods(1)
        """Step after which a user's loop compares next."""
        self._next_bytes = math.inf
        """Bytes to compare then."""
        self._cursor = 0
        """Position of the tensor to continue with, if only some are compared."""
        self._first_step_s = 0.0
        """Time at which the first step ended."""
        self._checks = 0
        self._work_s = 0.0
        """Time of all comparisons on this rank, without exchanges."""
        self._last_exchange_s = 0.0
        """Time of the last exchange on this rank."""
        self._exchanges_s = 0.0
        """Time of all exchanges but the last, each on the rank that came last; the same on all ranks."""
        self._spent_s = 0.0
        """Time of all comparisons, as known since the last one; the same on all ranks."""
        self._compared_bytes = 0
        self._model_bytes = 0
        self._last_equal: dict[str, int] = {}
        """Last step after which a tensor was equal on all ranks, by name."""
        self._difference: ReplicaDifference | None = None
        self._warned: set[bool] = set()
        """Whether differences by rounding, and larger ones, have been reported."""
        checksums([torch.zeros(1, device=comm.device)])  # The first call loads libraries.

    # Calls of `Sync` and of `Windows`.

    def after_step(self) -> None:
        """Count a step; in a loop without windows, compare if it is time to."""
        self._steps += 1
        if self._by_windows or not self._strategy.lockstep:
            return
        if self._steps == 1:
            self._first_step_s = time.perf_counter()
        if self._steps >= self._next_step:
            began_s = time.perf_counter()
            self._strategy.finish()
            self._work_s += time.perf_counter() - began_s
            trained_s = self._compare(self._strategy.model, math.inf if self._takes_power() else self._next_bytes)
            self._plan_next(trained_s)

    def at_window_end(self, train_s: float) -> None:
        """Compare if it is time to. `train_s` is the time of all windows so far, the same on all ranks."""
        if self._at_period_end:
            affordable = self._affordable_bytes(train_s)
            if self._takes_power():
                self._compare(self._strategy.model, math.inf)
            elif affordable >= self._turn_bytes:
                self._compare(self._strategy.model, affordable)

    def at_end(self) -> None:
        """Compare all weights at the end of training, if the strategy promises that they are equal now."""
        if self._at_period_end:
            self._strategy.finish()
            self._compare(self._strategy.model, math.inf)

    def in_agreed(self, model: nn.Module) -> None:
        """Compare all weights that the run would ship."""
        self._compare(model, math.inf)

    def at_close(self) -> None:
        """Compare all weights for the last time, unless an error is being handled: other ranks may not come then."""
        if sys.exc_info()[0] is not None:
            return
        try:
            self.at_end()
        except RuntimeError as error:
            if not is_peer_lost(error):
                raise
            # Another rank has ended without `close`.
            reason = str(error).splitlines()[0]
            warnings.warn(f"replicas were not compared in close(), since another rank is gone: {reason}", stacklevel=2)

    def result(self, train_s: float | None) -> ReplicaComparisons:
        """Return the comparisons so far, and their share of the training time; called on every rank."""
        control = self._comm.control
        spent_s = control.largest(self._work_s) + self._exchanges_s - control.largest(-self._last_exchange_s)
        return ReplicaComparisons(
            mode=self._mode,
            checks=self._checks,
            seconds=spent_s,
            share=spent_s / train_s if train_s else None,
            difference=self._difference,
        )

    # The steps to compare after.

    @property
    def _at_period_end(self) -> bool:
        return self._strategy.lockstep and self._steps % self._strategy.period == 0

    def _whole_periods(self, step: int) -> int:
        period = self._strategy.period
        return -(-step // period) * period

    def _takes_power(self) -> bool:
        """Return whether a power of two has been reached since the last call."""
        if self._steps < self._next_power:
            return False
        while self._next_power <= self._steps:
            self._next_power *= 2
        return True

    @property
    def _turn_bytes(self) -> int:
        return min(self._model_bytes, TURN_BYTES)

    def _affordable_bytes(self, train_s: float) -> float:
        """Return the bytes that can be compared now within the share of the training time, by the cost so far."""
        left_s = COST_SHARE * train_s - self._spent_s
        return left_s * self._compared_bytes / self._spent_s if self._spent_s else 0.0

    def _plan_next(self, trained_s: float) -> None:
        """Plan the next comparison of a loop without windows: at a power of two, or earlier if time allows it."""
        by_cost = sys.maxsize
        if self._steps > 1 and trained_s > 0:
            step_s = trained_s / (self._steps - 1)
            turn_s = self._spent_s * self._turn_bytes / self._compared_bytes
            missing_s = (self._spent_s + turn_s) / COST_SHARE - trained_s
            steps = max(1, math.ceil(missing_s / step_s))
            by_cost = self._steps + steps
            self._next_bytes = max(self._turn_bytes, self._affordable_bytes(trained_s + steps * step_s))
        self._next_step = self._whole_periods(min(self._next_power, by_cost))

    # One comparison.

    def _compare(self, model: nn.Module, limit_bytes: float) -> float:
        """Compare tensors of about `limit_bytes` in total; return the seconds since the first step, on all ranks."""
        began_s = time.perf_counter()
        all_tensors = self._replicated_tensors(model)
        self._model_bytes = sum(tensor.nbytes for tensor in all_tensors.values())
        tensors = self._take(all_tensors, limit_bytes)
        found = checksums(list(tensors.values()))
        now_s = time.perf_counter()
        self._work_s += now_s - began_s
        own = GuardMessage(
            checksum=_combined(tensors, found),
            work_ns=int(self._work_s * 1e9),
            last_exchange_ns=int(self._last_exchange_s * 1e9),
            trained_ns=int((now_s - self._first_step_s) * 1e9),
        )
        gathered = self._comm.control.gather(torch.tensor(own, dtype=torch.int64))
        self._last_exchange_s = time.perf_counter() - now_s
        everyone = [GuardMessage(*message.tolist()) for message in gathered]
        self._add_cost(everyone)
        self._compared_bytes += sum(tensor.nbytes for tensor in tensors.values())
        apart: set[str] = set()
        if len({message.checksum for message in everyone}) > 1:
            apart = self._examine(tensors, found)
        self._last_equal.update((name, self._steps) for name in tensors if name not in apart)
        return min(message.trained_ns for message in everyone) / 1e9

    def _add_cost(self, everyone: Sequence[GuardMessage]) -> None:
        """Update the cost from the values of all ranks.

        An exchange costs as long as it takes on the rank that comes last. The others wait for that rank, as they would
        otherwise do in their next step.
        """
        self._checks += 1
        self._exchanges_s += min(message.last_exchange_ns for message in everyone) / 1e9
        self._spent_s = max(message.work_ns for message in everyone) / 1e9 + self._exchanges_s

    def _examine(self, tensors: Mapping[str, Tensor], found: Sequence[int]) -> set[str]:
        """Measure and report the differences between the replicas; return the names of the tensors that differ."""
        began_s = time.perf_counter()
        differences = measure_differences(tensors, found, self._comm)
        self._work_s += time.perf_counter() - began_s
        if differences:
            self._report(differences)
        return {difference.name for difference in differences}

    def _replicated_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that should be equal on all ranks, by name; a tied weight has the first of its names."""
        tensors: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if not p.is_meta}
        if self._compare_statistics:
            layers = [(name, one) for name, one in model.named_modules() if isinstance(one, SyncedBatchNorm)]
            tensors |= {f"{name}.{key}": buffer for name, layer in layers for key, buffer in layer.named_buffers()}
        return tensors

    def _take(self, tensors: dict[str, Tensor], limit_bytes: float) -> Mapping[str, Tensor]:
        """Return the next tensors in turn, of up to `limit_bytes` in total, but at least one."""
        if limit_bytes >= self._model_bytes:
            return tensors
        names = list(tensors)
        start, taken, size = self._cursor % len(names), dict[str, Tensor](), 0
        for name in names[start:] + names[:start]:
            size += tensors[name].nbytes
            if taken and size > limit_bytes:
                break
            taken[name] = tensors[name]
        self._cursor = start + len(taken)
        return taken

    def _report(self, differences: Sequence[TensorDifference]) -> None:
        """Stop the run for a difference that rounding does not explain; otherwise, and in the mode `warn`, keep it."""
        worst = differences[0]
        difference = ReplicaDifference(
            step=self._steps,
            last_equal_step=self._last_equal.get(worst.name),
            tensor=worst.name,
            tensors=len(differences),
            ranks=list(worst.ranks),
            distance=worst.distance if math.isfinite(worst.distance) else None,
            by_rounding=worst.distance <= ROUNDING,
        )
        sentence = difference_sentence(difference)
        if not difference.by_rounding and self._mode == "stop":
            raise ReplicaError(f"{sentence}.", hint=_HINT)
        if self._difference is None or _size(difference) > _size(self._difference):
            self._difference = difference
        if difference.by_rounding not in self._warned:
            self._warned.add(difference.by_rounding)
            if self._comm.rank == 0 and not self._by_windows:  # The summary of a recorded run shows it.
                warnings.warn(f"{sentence}.", stacklevel=2)


class GuardMessage(NamedTuple):
    """Values that ranks exchange in a comparison."""

    checksum: int
    """Checksum of the names and checksums of the tensors."""
    work_ns: int
    """Time of all comparisons on this rank, without exchanges."""
    last_exchange_ns: int
    """Time of the exchange before this one."""
    trained_ns: int
    """Time since the end of the first step."""


def _combined(names: Mapping[str, Tensor], values: Sequence[int]) -> int:
    """Return one checksum, as a signed number, of the names and checksums of tensors."""
    digest = xxhash.xxh3_64("\n".join(names).encode())
    digest.update(np.array(values, dtype=np.uint64).tobytes())
    return int(digest.intdigest()) - 2**63


def _size(difference: ReplicaDifference) -> float:
    return math.inf if difference.distance is None else difference.distance
