"""Recording of a run on one rank: wires the stopwatch, the writers of the record and the windows of the run.

Paceline's loop, a user's script and the measurement of the cost of recording all train through it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from paceline.analysis.resources import training_time, usage_between
from paceline.analysis.steps.split import split_of
from paceline.comm import Comm
from paceline.config import RunConfig
from paceline.measure.activity import ACTIVITY
from paceline.measure.gpu_readings import gpu_identity
from paceline.measure.memory import peak_bytes, reset_peak
from paceline.measure.profiler import StepProfiler
from paceline.measure.run_monitor import RunMonitor
from paceline.records import RunFolder, Summary, Topology
from paceline.records.events import RunEvent
from paceline.records.schema import GRAPHS, MarkRow
from paceline.records.settings import Settings
from paceline.records.summary import RankSummary
from paceline.records.timeline import read_timeline, timeline_file
from paceline.training.recording import results
from paceline.training.recording.clock_sync import start_clocks
from paceline.training.recording.history import Resumed
from paceline.training.recording.run_recorder import RunRecorder, WriteEvent, discard_event
from paceline.training.recording.step_recorder import StepRecorder
from paceline.training.recording.tensorboard import TensorBoardWriter
from paceline.training.recording.windows import Boundaries, Windows
from paceline.training.sync import Sync


class Recording:
    """Recording of a run on one rank.

    Call `describe` before the strategy is attached and `start` after it. Training goes through `stopwatch`,
    `step_recorder` and `windows`. `summarise` and `finish` follow it, `close` ends the recording in any case.

    `first_on_host` is whether this rank is the first on its host; `on_event` is called with each event of the run. The
    record of a run that has `resumed` goes on in the same folder.
    """

    step_recorder: StepRecorder
    windows: Windows

    def __init__(
        self,
        config: RunConfig,
        comm: Comm,
        folder: RunFolder,
        *,
        first_on_host: bool = False,
        on_event: WriteEvent = discard_event,
        resumed: Resumed | None = None,
    ) -> None:
        assert comm.stopwatch is not None, "only a comm with a stopwatch can be recorded"
        self.stopwatch = comm.stopwatch
        self._config = config
        self._comm = comm
        self._folder = folder
        self._first_on_host = first_on_host
        self._peak_is_ours = reset_peak(comm.device)
        self._resumed = resumed
        continued_s = None if resumed is None else resumed.recorded.time_s
        start_clocks(comm, continued_s or 0.0)
        self._recorder = RunRecorder(folder, comm.rank, self.stopwatch.clock.now, on_event, continued_s=continued_s)
        self._monitor: RunMonitor | None = None
        self._captures: list[MarkRow] = []
        """Times in which CUDA graphs were tried or captured."""

    def describe(self, settings: Settings, topology: Topology, command: str | None) -> None:
        """Write the information known before the first step; called on every rank.

        Rank 0 writes it, and so does the first rank of a host that does not share rank 0's disk.
        """
        if self._comm.rank == 0:
            self._recorder.write_description(settings, topology, command)
        self._comm.control.barrier()  # On a shared disk the others find rank 0's file.
        if self._comm.rank != 0 and self._first_on_host and not self._folder.has_run_file:
            self._recorder.write_description(settings, topology, command)

    def start(self, sync: Sync, *, steps_only: bool = False) -> None:
        """Prepare for the first step. With `steps_only` there is no profile, and resources are not monitored."""
        config, recorder = self._config, self._recorder
        self._sync = sync
        if self.stopwatch.operations is not None:
            self.stopwatch.operations.sample_periods(sync.strategy.period)
        self.step_recorder = StepRecorder(
            self.stopwatch,
            recorder.steps,
            recorder.timeline if config.events else None,
            first_step := 0 if self._resumed is None else self._resumed.step,
            recorder.step_counter(first_step) if sync.strategy.lockstep else None,
        )
        profiler = None if steps_only else self._make_profiler()
        self.windows = Windows(
            sync,
            self.step_recorder,
            config.log_every,
            recorder.write_event,
            profiler,
            config.seconds,
            boundaries_of(config, lockstep=sync.strategy.lockstep),
            self._resumed,
        )
        if not steps_only:
            self._start_monitoring()
        ACTIVITY.follow(self.stopwatch, self.windows.first_step)

    def _make_profiler(self) -> StepProfiler | None:
        steps = self._config.profiled_steps
        return StepProfiler(steps, self._folder, self._comm.rank, self._comm.device) if steps else None

    def _start_monitoring(self) -> None:
        rank, clock, device = self._comm.rank, self.stopwatch.clock, self._comm.device
        self._monitor = RunMonitor(self._folder, rank, clock.now, device, first_on_host=self._first_on_host)
        self._recorder.add_listener(self._monitor)
        if self._config.tensorboard:
            self._recorder.add_listener(TensorBoardWriter(self._folder, rank, clock, device))

    def write_event(self, event: RunEvent) -> None:
        """Write an event to the record."""
        self._recorder.write_event(event)

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record the `with` block as an event on this rank, such as an evaluation."""
        assert self._monitor is not None
        with self._monitor.marks.span(kind), ACTIVITY.doing(f"in the {kind}"):
            yield

    @contextmanager
    def capturing_graphs(self) -> Iterator[None]:
        """Record the `with` block as an event on this rank whose use of resources is not that of training."""
        if self._monitor is None:
            yield
            return
        sampler, now = self._monitor.sampler, self.stopwatch.clock.now
        sampler.sample()
        mark = MarkRow(GRAPHS, now(), math.inf, "")
        try:
            with ACTIVITY.doing("capturing CUDA graphs"):
                yield
        finally:
            mark = mark._replace(end_s=now())
            sampler.sample()
            self._captures.append(mark)
            self._monitor.marks.add(*mark)

    def summarise(self) -> Summary:
        """End training and return its figures, the same on every rank; called on every rank before evaluation."""
        self.windows.finish()
        if self._sync.guard is not None:
            self._sync.guard.at_end()
        own = self._own_summary()
        return results.summarise(self._config.strategy, self._sync, own, self.windows)

    def _own_summary(self) -> RankSummary:
        """Return the figures of this rank.

        They were summed while it trained. Only the time split is computed now, from the timeline on disk, which has
        the first steps and a decreasing share of the others (`RecordedSteps`).
        """
        assert self._monitor is not None
        rank, totals = self._comm.rank, self.step_recorder.totals
        self._monitor.sampler.sample()
        samples = self._monitor.sampler.samples()
        used = usage_between(rank, samples, *(totals.span_s or training_time(samples, steps=None)), self._captures)
        timeline = self._folder.path / timeline_file(rank)
        first = self.windows.first_step
        without = frozenset(step - first for step in self.windows.totals.profiled_steps if step >= first)
        split = split_of(read_timeline(timeline), without) if timeline.is_file() else None
        peak = peak_bytes(self._comm.device) if self._peak_is_ours else None
        gpu = gpu_identity(self._comm.device)
        return totals.summary(rank, used=used, peak_bytes=peak, split=split, gpu=gpu)

    def write_summary(self, summary: Summary) -> None:
        """Write the figures of the whole run, which may not be complete yet."""
        self._recorder.write_summary(summary)

    def finish(self, summary: Summary) -> None:
        """Write the figures and mark the run as finished."""
        self._recorder.finish(summary)

    def close(self) -> None:
        """Close all files."""
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def boundaries_of(config: RunConfig, *, lockstep: bool) -> Boundaries:
    """Return the steps and times at which a run evaluates or writes a checkpoint.

    Ranks that do not step together evaluate at the end of any window.
    """
    interval = config.checkpoint_interval
    steps = (config.eval_steps if lockstep else None, None if interval is None else interval.steps)
    return Boundaries(tuple(every for every in steps if every), None if interval is None else interval.seconds)
