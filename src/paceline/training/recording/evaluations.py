"""Evaluations of a run: of the agreed weights, while it trains and at its end; at the end also of each replica."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.comm.messages.json_messages import gather_typed
from paceline.config import RunConfig
from paceline.errors import WorkloadError
from paceline.records.events import EvaluationEvent
from paceline.records.summary import BestEvaluation, EvaluationResult, ReplicaEvaluation
from paceline.training.evaluate import evaluate
from paceline.training.recording.recording import Recording
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, Source, make_source
from paceline.workloads.random_state import kept_random_state
from paceline.workloads.tickets import ONE_SHOT_HINT
from paceline.workloads.workload import Workload

LARGEST_TEST_BATCH = {"cpu": 256, "cuda": 4096}
"""Most samples of a rank's test batch, by the type of the device. A CPU gains nothing from more. With fewer a GPU
waits for the host, which has to start hundreds of kernels for each batch."""


@dataclass(frozen=True)
class HeldOut:
    """Test data: split among the ranks, and whole for each rank."""

    shared: Source
    whole: Source


def make_held_out(config: RunConfig, workload: Workload, share: Share) -> HeldOut | None:
    """Return the test data, None if nothing is tested. Call it before training, so that errors in it show early."""
    option = f"--eval-every {config.eval_every}" if config.eval_every else f"--target {config.target}"
    if workload.test is None and config.evaluates_while_training:
        raise WorkloadError(
            f"{option} was given, but the workload has no test data.",
            hint=f"give the workload test data, or leave {option.partition(' ')[0]} out",
        )
    if config.target is not None and workload.correct is None:
        raise WorkloadError(
            f"--target {config.target} is an accuracy, but the workload does not count correct predictions.",
            hint="let make_workload return Workload(correct=…), or leave --target out",
        )
    if workload.test is None or not config.evaluate:
        return None
    # Evaluation keeps nothing for backward, so twice a training micro-batch still needs less memory.
    largest = LARGEST_TEST_BATCH.get(share.device.type, LARGEST_TEST_BATCH["cpu"])
    each = min(largest, 2 * config.global_batch(share.workers) // (share.workers * config.accumulate))
    shared = dataclasses.replace(share, micro_batches_per_step=1)
    alone = dataclasses.replace(shared, rank=0, workers=1)
    found = HeldOut(
        *[make_source(workload.test, s, batch=each * s.workers, seed=config.seed, train=False) for s in (shared, alone)]
    )
    if config.evaluates_while_training and found.shared.runs_once:
        raise WorkloadError(f"{option} needs test data that can be read several times.", hint=ONE_SHOT_HINT)
    return found


class Evaluations:
    """Evaluations of one run; every rank makes the same calls. They leave no trace in what is trained or timed."""

    def __init__(
        self, config: RunConfig, workload: Workload, sync: Sync, held_out: HeldOut, recording: Recording
    ) -> None:
        self.best: BestEvaluation | None = None
        """Best evaluation so far, by accuracy or, where none is defined, by loss; None before the first."""
        self._config = config
        self._workload = workload
        self._sync = sync
        self._held_out = held_out
        self._recording = recording
        self._last: EvaluationEvent | None = None
        self.last_step: int | None = None
        """Steps done at the last evaluation; None before the first."""
        self.epochs = 0
        """Epochs completed at the last evaluation while training."""

    def resume(self, best: BestEvaluation | None, *, last_step: int | None, epochs: int) -> None:
        """Go on after the evaluations of a run that resumes."""
        self.best, self.last_step, self.epochs = best, last_step, epochs

    @property
    def is_target_reached(self) -> bool:
        """Whether the best accuracy so far is the target of the run, or above it; the same on all ranks."""
        return self.best is not None and self._config.is_target(self.best.accuracy)

    def run_if_due(self, step: int, epochs: int) -> None:
        """Evaluate between two windows, after `step` steps and `epochs` whole epochs, if `--eval-every` asks for it."""
        if not self._is_due(step, epochs) or self._recording.windows.is_profiling:
            return
        self.epochs = epochs
        with kept_random_state(self._sync.comm.device):  # A user's loss may draw random numbers.
            self._recording.write_event(self._evaluate(step))
        if self._sync.payload is not None:  # What evaluation sends does not belong to the next window.
            self._sync.payload.close_window(0, counts=False)

    def at_end(self, step: int) -> EvaluationEvent:
        """Return the result after the last step, with that of each rank's replica if `--eval-ranks` asks for it."""
        last = self._last
        event = last if last is not None and last.step == step else self._evaluate(step)
        if self._config.eval_ranks:
            event = EvaluationEvent(
                step=event.step, epoch=event.epoch, test=event.test, test_by_rank=self._evaluate_replicas()
            )
        if event is not last:  # Otherwise it is in the record.
            self._recording.write_event(event)
        return event

    def _is_due(self, step: int, epochs: int) -> bool:
        every = self._config.eval_steps
        if every is None:
            return self._config.evaluates_while_training and epochs > self.epochs
        return step // every > (self.last_step or 0) // every

    def _evaluate(self, step: int) -> EvaluationEvent:
        """Evaluate the agreed weights, split among the ranks."""
        source = self._held_out.shared
        with self._recording.span("evaluation"), self._sync.agreed() as model:
            found = evaluate(model, self._workload, source, self._config, self._sync.comm)
        if not found.samples and self._last is not None and self._last.test.samples:
            raise WorkloadError("the test data has no batch when it is read again.", hint=ONE_SHOT_HINT)
        test = EvaluationResult(
            loss=found.loss, accuracy=found.accuracy, samples=found.samples, available=source.samples
        )
        self._last = EvaluationEvent(step=step, epoch=self._recording.windows.epoch, test=test)
        self.last_step = step
        self._keep_best(self._last)
        return self._last

    def _evaluate_replicas(self) -> list[ReplicaEvaluation]:
        """Evaluate each rank's own replica on all of the test data."""
        with self._recording.span("evaluation"):
            own = evaluate(self._sync.strategy.model, self._workload, self._held_out.whole, self._config, comm=None)
        replica = ReplicaEvaluation(loss=own.loss, accuracy=own.accuracy)
        return gather_typed(replica, ReplicaEvaluation, self._sync.comm.control)

    def _keep_best(self, event: EvaluationEvent) -> None:
        test = event.test
        if test.samples and (self.best is None or _goodness(test) > _goodness(self.best)):
            self.best = BestEvaluation(step=event.step or 0, epoch=event.epoch, loss=test.loss, accuracy=test.accuracy)


def _goodness(result: EvaluationResult | BestEvaluation) -> float:
    """Return a number that is higher for a better result."""
    if result.accuracy is not None:
        return result.accuracy
    return -result.loss if result.loss is not None and math.isfinite(result.loss) else -math.inf
