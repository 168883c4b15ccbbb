"""Live display of a run, which follows its record: a configuration line, losses and a progress bar."""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
)

from paceline.analysis.core_sharing import sharing_in_run, sharing_sentence
from paceline.analysis.precision import choice_sentence
from paceline.analysis.remaining_time import Part, RemainingTime, TimeEstimator
from paceline.config.recipe import reached_share, warm_up_length
from paceline.config.run import EPOCH
from paceline.config.slow_ranks import format_slow_ranks, parse_slow_ranks
from paceline.config.whole_number import whole_number
from paceline.errors import RecordError
from paceline.formatting import WATTS, count, number, percent, plural, seconds, short, whole
from paceline.records import RunDescription, Topology
from paceline.records.decoder import read_model
from paceline.records.description import RecordedRecipe
from paceline.records.events import (
    RUN_EVENTS,
    CheckpointEvent,
    CompilingEvent,
    ConfigEvent,
    CudaGraphEvent,
    EpochEvent,
    EvaluationEvent,
    LogEvent,
    ResumedEvent,
    StartEvent,
    decode_event,
)
from paceline.records.schema import EVENTS_FILE, RUN_FILE, ResourceRow, resources_file, steps_file
from paceline.records.summary import EvaluationResult
from paceline.report.run_description import format_remaining

POLL_S = 0.2
STEP, EVALUATION = Part("step"), Part("evaluation")


class Tail:
    """Reader of the new, complete lines of a growing file."""

    def __init__(self, file: Path, *, from_end: bool = False) -> None:
        """Read a file from its beginning, or from its present end."""
        self._file = file
        self._offset = file.stat().st_size if from_end and file.exists() else 0

    def new_lines(self) -> list[str]:
        """Return the lines completed since the last call."""
        try:
            with self._file.open("rb") as stream:
                if stream.seek(0, os.SEEK_END) < self._offset:  # A restart wrote the file anew.
                    self._offset = 0
                stream.seek(self._offset)
                text = stream.read()
        except OSError:  # The file does not exist yet; if it never will, the writing process reports why.
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode().split("\n")[:-1]


class GpuTail(Tail):
    """Reader of the latest use and power of a rank's GPU, from its samples."""

    _shown = ""

    def latest(self) -> str:
        """Return the latest figures, as in "GPU 93%, 412 W"; empty where the GPU reports none."""
        for line in self.new_lines()[-1:]:
            cells = dict(zip(ResourceRow._fields, line.split(","), strict=False))
            busy, power_w = (_number(cells.get(name)) for name in ("gpu_busy", "gpu_power_w"))
            words = [] if busy is None else [f"GPU {percent(busy, 0)}"]
            words += [] if power_w is None else [WATTS.text(power_w) if words else f"GPU {WATTS.text(power_w)}"]
            self._shown = ", ".join(words)
        return self._shown


def _number(cell: str | None) -> float | None:
    try:
        return float(cell) if cell else None
    except ValueError:  # The header line.
        return None


class EventTail(Tail):
    """Reader of the new events of a run or an examination."""

    def new_events(self, kinds: Mapping[str, type[Any]]) -> list[Any]:
        """Return the events completed since the last call, without unknown ones."""
        events = [decode_event(line.encode(), kinds) for line in self.new_lines()]
        return [event for event in events if event is not None]


class Display:
    """Context manager of a display that a separate thread draws.

    Ctrl-C interrupts the main thread only, so the drawing thread always closes the terminal display that it opened. If
    Ctrl-C interrupts `close`, call it again.
    """

    def __init__(self, draw: Callable[[threading.Event], None]) -> None:
        """Create a display; `draw` must return soon after its event is set."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=draw, args=(self._stop,), daemon=True, name="paceline-display")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing, and wait for the drawing thread."""
        self._stop.set()
        if self._thread.ident is not None:  # The thread was started.
            self._thread.join()


class FolderFollower(Display, ABC):
    """Display that shows the contents of a growing folder."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        super().__init__(self._follow)
        self.folder = folder
        self._progress = progress

    @abstractmethod
    def catch_up(self) -> None:
        """Read and show what was written since the last call."""

    def _follow(self, stop: threading.Event) -> None:
        with self._progress:
            while not stop.wait(POLL_S):
                self.catch_up()
            self.catch_up()


class LiveRun(FolderFollower):
    """Live display of one training run."""

    def __init__(self, folder: Path, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._events = EventTail(folder / EVENTS_FILE, from_end=True)
        self._steps = Tail(folder / steps_file(0))
        self._gpu = GpuTail(folder / resources_file(0))
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[gpu]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        super().__init__(folder, progress)
        self._log_every = 1
        self._total: int | None = None
        self._lr: float | None = None
        self._topology: Topology | None = None
        self._evaluated_step: int | None = None
        """Step of the last evaluation that was printed."""
        self._estimator = TimeEstimator()
        self._windows = self._trained = 0
        self._trained_s = 0.0
        """Seconds of training so far, without evaluations."""
        self._seconds: float | None = None
        """Seconds of training after which the run ends."""
        self._eval_every: str = ""
        self._epoch_steps: int | None = None
        self._last_event_s = 0.0
        self._task: TaskID = self._progress.add_task("starting ranks", total=None, figures="", gpu="", left="")

    def catch_up(self) -> None:
        for event in self._events.new_events(RUN_EVENTS):
            match event:
                case ConfigEvent():
                    self._on_config(event)
                case CompilingEvent():
                    self._progress.update(self._task, description="compiling")
                case StartEvent():
                    self._on_start(event)
                case LogEvent():
                    self._on_log(event)
                case EpochEvent():
                    self._on_epoch(event)
                case EvaluationEvent():
                    self._on_evaluation(event)
                case CheckpointEvent():
                    self._on_checkpoint(event)
                case CudaGraphEvent() if not event.is_expected:
                    self._print(escape(cuda_graph_line(event)))
                case ResumedEvent():
                    self._on_resumed(event)
            self._last_event_s = event.time_s
        rows = sum(not line.startswith("step") for line in self._steps.new_lines())
        self._trained += rows
        self._progress.update(self._task, completed=self._trained, gpu=self._gpu.latest(), left=self._time_left())

    def _time_left(self) -> str:
        """Return the remaining time of training and its evaluations, as measured so far; empty while it is unknown."""
        limit_s = math.inf if self._seconds is None else max(0.0, self._seconds - self._trained_s)
        steps = None if self._total is None else max(0, self._total - self._trained)
        training = None if steps is None else self._remaining(STEP, steps)
        if not limit_s or steps == 0 or not self._windows:
            return ""
        if training is None:
            training = RemainingTime(limit_s, limit_s, limit_s)
        if math.isinf(training.high_s):
            return ""
        evaluating = self._remaining(EVALUATION, self._evaluations_left(steps, limit_s))
        low_s, high_s = (min(end, limit_s) for end in (training.low_s, training.high_s))
        if evaluating is not None:
            low_s, high_s = low_s + evaluating.low_s, high_s + evaluating.high_s
        return f"{format_remaining(RemainingTime(low_s, high_s, high_s))} left"

    def _remaining(self, part: Part, times: int) -> RemainingTime | None:
        """Return the time of a part that occurs some times more; None if it was not measured yet."""
        self._estimator.expect("part", [part], times, times)
        return self._estimator.remaining()

    def _evaluations_left(self, steps: int | None, limit_s: float) -> int:
        """Return the number of evaluations to come, in a number of steps or, if they take longer, in a time."""
        every = whole_number(self._eval_every) or self._epoch_steps
        if not self._eval_every or not every or not self._trained_s:
            return 0
        in_time = limit_s * self._trained / self._trained_s
        last = self._trained + min(math.inf if steps is None else steps, in_time)
        return max(0, math.ceil(last / every) - self._trained // every)

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._progress.console.print(text, highlight=False, soft_wrap=True)

    def _on_config(self, event: ConfigEvent) -> None:
        self._log_every, self._topology = event.log_every, event
        self._read_settings()
        self._print(configuration_line(event))
        slowed = format_slow_ranks(parse_slow_ranks(event.slow_rank))
        if slowed:
            self._print(f"by --slow-rank: {slowed}")
        sharing = sharing_in_run(event)
        if sharing:
            self._print(f"warning: {sharing_sentence(sharing)}")

    def _read_settings(self) -> None:
        """Read the settings that decide when the run ends and is tested, if its description is there."""
        try:
            config = read_model(self.folder / RUN_FILE, RunDescription, "run").config
        except RecordError:
            return
        by_default = EPOCH if config.get("target") else ""
        self._seconds, self._eval_every = config.get("seconds"), str(config.get("eval_every") or by_default)

    def _on_start(self, event: StartEvent) -> None:
        self._total, self._epoch_steps = event.steps, event.steps_per_epoch
        self._progress.update(self._task, description="training", total=self._total)
        if event.compile_s is not None:
            self._print(f"compiled the model in {seconds(event.compile_s)}")
        self._note_short_run(event)
        if event.dropped:
            self._print(f"each epoch leaves out {plural(event.dropped, 'sample')}, too few for a batch on all ranks")

    def _note_short_run(self, event: StartEvent) -> None:
        """Print the learning rate that a run reaches, if it is too short for the peak of its recipe."""
        recipe = None if self._topology is None else self._topology.recipe
        if self._topology is None or recipe is None or not recipe.schedule or self._topology.lr is None:
            return
        rising = warm_up_length(recipe, event.steps_per_epoch or 0)
        share = reached_share(rising, event.steps)
        if share < 1:
            self._print(
                f"the run is shorter than twice its warm-up of {plural(rising, 'step')}, so the learning rate reaches "
                f"only {short(share * self._topology.lr, 3)}; train longer, or shorten it with --warmup-epochs"
            )

    def _on_log(self, event: LogEvent) -> None:
        self._lr = event.lr
        self._windows += 1
        self._trained_s += event.wall_s
        if self._windows == 2:  # The first window has warm-up steps.
            self._estimator.forget(STEP)
        self._estimator.measure(STEP, event.wall_s / len(event.losses))
        rate = event.samples / event.wall_s
        accuracy = None if event.correct is None else event.correct / event.samples
        self._progress.update(self._task, figures=" ".join(_figures(event.losses[-1], accuracy, rate)))
        epochs = event.epochs or [event.epoch] * len(event.losses)
        first = event.step - len(event.losses) + 1
        for step, (loss, epoch) in enumerate(zip(event.losses, epochs, strict=True), start=first):
            if step % self._log_every == 0 or step == self._total:
                shown = " ".join(_figures(loss, accuracy, rate))
                self._print(f"step {step:>6}  epoch {epoch + 1:>3}  {shown}")
        if event.skipped:
            count, last = plural(len(event.skipped), "step"), event.skipped[-1] + 1
            self._print(f"step {last:>6}  skipped the update of {count}: gradients were not finite")

    def _on_epoch(self, event: EpochEvent) -> None:
        self._progress.update(self._task, description=f"trained {plural(event.epoch + 1, 'epoch')}")

    def _on_checkpoint(self, event: CheckpointEvent) -> None:
        """Print a warning if a checkpoint could not be written."""
        if event.error is not None:
            self._print(f"warning: {escape(event.error)}")

    def _on_resumed(self, event: ResumedEvent) -> None:
        for warning in event.warnings:
            self._print(f"warning: {escape(warning)}")
        self._trained = event.step
        self._print(escape(resumed_line(event, self._topology)))
        for lost in event.lost:
            self._print(f"warning: not resumed: {escape(lost)}")

    def _on_evaluation(self, event: EvaluationEvent) -> None:
        """Print the result, unless it is the only one: the summary of the run has that of the end."""
        self._estimator.measure(EVALUATION, max(0.0, event.time_s - self._last_event_s))
        is_only = self._evaluated_step is None and event.step in (None, self._total)
        if event.step is None or is_only or event.step == self._evaluated_step:
            return
        self._evaluated_step = event.step
        epoch = "" if event.epoch is None else f"  epoch {event.epoch + 1:>3}"
        rate = "" if self._lr is None else f", lr {short(self._lr, 3)}"
        self._print(f"step {event.step:>6}{epoch}  {format_evaluation(event.test)}{rate}")


def cuda_graph_line(event: CudaGraphEvent) -> str:
    """Describe whether steps are replayed from CUDA graphs, and why not."""
    if not event.used:
        return f"without CUDA graphs: {event.reason}"
    if event.reason:
        return f"only some steps are replayed from CUDA graphs: {event.reason}"
    return f"steps are replayed from CUDA graphs, which took {seconds(event.took_s)} to capture and to check"


def resumed_line(event: ResumedEvent, topology: Topology | None) -> str:
    """Describe where a run goes on, as in "resumed at step 1,200, 37 steps done again"."""
    words = [f"resumed at step {whole(event.step)}" if event.checkpoint else "started again from the beginning"]
    if event.redone:
        words.append(f"{plural(event.redone, 'step')} done again")
    if topology is not None and event.ranks_before and event.ranks_before != topology.workers:
        words.append(f"on {plural(topology.workers, 'rank')} instead of {event.ranks_before}, same global batch")
    if topology is not None and event.strategy_before not in ("", topology.strategy):
        words.append(f"under {topology.strategy} instead of {event.strategy_before}")
    return ", ".join(words)


def format_evaluation(test: EvaluationResult) -> str:
    """Format the result of an evaluation, as in "test loss 0.4100, accuracy 88.1%"."""
    loss = "test loss not finite" if test.loss is None else f"test loss {number(test.loss)}"
    return loss if test.accuracy is None else f"{loss}, accuracy {percent(test.accuracy)}"


def configuration_line(topology: Topology) -> str:
    """Format the configuration of a run as one line, with rich markup."""
    each = "–".join(str(size) for size in topology.batch_per_rank)
    batch = f"batch {topology.batch} = {topology.workers} × {each}" if each else "batches from the workload"
    ranks, servers = plural(topology.workers, "rank"), topology.servers
    idle = topology.world_size - topology.workers - servers
    beside = [f"and {plural(servers, 'server')}"] * (servers > 0) + [f"({idle} idle)"] * (idle > 0)
    return " · ".join(
        [
            f"[bold]{escape(topology.workload)}[/bold], {count(topology.parameters)} parameters",
            " ".join([f"{escape(topology.strategy)} on {ranks}", *beside]),
            batch,
            _optimizer_words(topology),
            *_precision_words(topology),
            f"{plural(topology.threads, 'thread')} per rank",
            f"{topology.device}, {topology.backend} over {topology.interface}",
        ]
    )


def _precision_words(topology: Topology) -> list[str]:
    """Describe the number format, if it is not the usual one, and why it was chosen."""
    if topology.precision_choice is not None:
        return [escape(choice_sentence(topology.precision_choice))]
    return [] if topology.precision in (None, "fp32") else [topology.precision]


def _optimizer_words(topology: Topology) -> str:
    """Describe optimiser, learning rate and schedule, as in "sgd, lr 0.4 = 0.2 × √(1024 ÷ 256), cosine"."""
    recipe, lr = topology.recipe, topology.lr
    if recipe is None or topology.user_optimizer or lr is None:
        return "user-defined optimiser"
    ratio = f"{topology.batch} ÷ {recipe.reference_batch}"
    factor = {"linear": f" × {ratio}", "sqrt": f" × √({ratio})"}.get(recipe.scale_lr, "")
    scaled = f" = {short(recipe.lr)}{factor}" if factor and lr != recipe.lr else ""
    rising = f", warm-up of {_warm_up_words(recipe)}" if recipe.warmup_epochs or recipe.warmup_steps else ""
    return f"{recipe.optimizer}, lr {short(lr)}{scaled}, {recipe.schedule or 'own schedule'}{rising}"


def _warm_up_words(recipe: RecordedRecipe) -> str:
    """Describe the length of a warm-up, as in "2 epochs, at least 100 steps"."""
    epochs = short(recipe.warmup_epochs)
    words = [f"{epochs} epoch{'' if epochs == '1' else 's'}"] * (recipe.warmup_epochs > 0)
    least = plural(recipe.warmup_steps, "step")
    return ", ".join([*words, *[f"at least {least}" if words else least] * (recipe.warmup_steps > 0)])


def _figures(loss: float | None, accuracy: float | None, rate: float) -> Iterator[str]:
    yield "loss not finite" if loss is None else f"loss {number(loss)}"
    if accuracy is not None:
        yield f"accuracy {percent(accuracy)}"
    yield f"{whole(rate)} samples/s"
