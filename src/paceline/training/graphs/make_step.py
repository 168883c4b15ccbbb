"""Choice between steps with and without CUDA graphs, from the settings of a run and its strategy."""

from __future__ import annotations

from torch.amp import GradScaler

from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.records.events import CudaGraphEvent
from paceline.strategies.base.strategy import Strategy
from paceline.training.gradient_noise import why_not_measured
from paceline.training.graphs.capture import CAPTURERS
from paceline.training.graphs.graphed_step import GraphedStep
from paceline.training.recording.recording import Recording
from paceline.training.step import TrainingStep
from paceline.training.sync import Sync
from paceline.workloads.batches import Source
from paceline.workloads.workload import Workload


def make_step(
    config: RunConfig,
    workload: Workload,
    sync: Sync,
    source: Source,
    recording: Recording,
    scaler: GradScaler | None,
) -> TrainingStep:
    """Return the step of a run: with CUDA graphs if they are allowed and can be tried."""
    plain = TrainingStep(config, workload, sync, source, recording, scaler)
    if config.cuda_graph == "off":
        return plain
    if source.share.device.type not in CAPTURERS:
        if config.cuda_graph == "on":
            raise UsageError(
                "--cuda-graph on was given, but the run trains on a CPU.", hint="use --device cuda, or leave it out"
            )
        return plain
    reason = why_no_graph(config, sync.strategy, sync.ranks)
    if reason is None:
        return GraphedStep(config, workload, sync, source, recording, scaler)
    if config.cuda_graph == "on":
        raise UsageError(f"--cuda-graph on was given, but {reason}", hint="use --cuda-graph auto, or off")
    recording.write_event(CudaGraphEvent(used=False, reason=reason, is_expected=config.cuda_graph is None))
    return plain


def why_no_graph(config: RunConfig, strategy: Strategy, workers: int) -> str | None:
    """Return why a step of so many workers cannot be a graph, as the end of a sentence; None if a trial may decide."""
    if config.precision == "fp16" or config.on_nan == "skip":
        setting = "--precision fp16" if config.precision == "fp16" else "--on-nan skip"
        return f"{setting} decides on the host, in every step, whether to update the weights."
    if "cuda_graph" not in strategy.supports:
        return f"{strategy.name} does more than update the weights after backward, which a graph cannot contain."
    if config.bn == "sync" and strategy.exchanges:
        return "--bn sync exchanges statistics in the forward pass, which a graph cannot contain."
    if config.noise_scale == "all" and why_not_measured("all", strategy, workers, config.accumulate) is None:
        return "--noise-scale all reads the gradients of every step by hooks, which a graph does not run."
    if config.profile and config.cuda_graph != "on":
        return "--profile attributes time to operators, which a graph does not run."
    if config.allow_unused:
        return "--allow-unused lets the parameters that get a gradient differ from step to step."
    return None
