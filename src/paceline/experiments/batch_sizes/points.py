"""The points of an experiment over batch sizes: every size on every shape of ranks, without those that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.config import DEFAULT_STRATEGY, BatchConfig, RunConfig
from paceline.config.slow_ranks import check_slow_ranks
from paceline.errors import UsageError
from paceline.experiments.candidates import CandidateConfig
from paceline.experiments.scaling.points import Points, fits, point_candidate
from paceline.experiments.scaling.shapes import ALONE, choose_shapes
from paceline.formatting import join_names, plural, whole
from paceline.launch.launcher_process import LauncherProcess, Shape
from paceline.strategies.registry import BASELINE_STRATEGIES, parse_list, trains_in_one_process
from paceline.training.rank_setup import check_batch_fits


def choose_batch_shapes(config: BatchConfig, launcher: LauncherProcess, on_one_host: int) -> list[Shape]:
    """Return the shapes to measure, fewest ranks first; one rank only if the user names it, or no world size."""
    shapes = choose_shapes(config, launcher, on_one_host)
    return [shape for shape in shapes if not config.rank_counts or shape.ranks in config.rank_counts]


def make_batch_points(base: RunConfig, config: BatchConfig, shapes: Sequence[Shape]) -> Points:
    """Return every size on every shape, checked: `single` on one rank, the strategies on several."""
    if config.strategies and base.strategy != DEFAULT_STRATEGY:
        raise UsageError("--strategy and --strategies were both given.", hint="name all of them with --strategies")
    text = config.strategies or base.strategy
    strategies = [name for name in parse_list(text) if not trains_in_one_process(name)]
    check_slow_ranks(base.slowed, max(shape.ranks for shape in shapes))
    found: list[CandidateConfig] = []
    too_small: dict[int, list[int]] = {}
    for shape in shapes:
        for size in config.batch_sizes:
            batch = config.global_batch(size, shape.ranks)
            if batch < shape.ranks * base.accumulate:
                too_small.setdefault(shape.ranks, []).append(size)
                continue
            for strategy in BASELINE_STRATEGIES if shape == ALONE else strategies:
                one = point_candidate(replace(base, strategy=strategy, batch=batch), shape, "batch")
                if one is not None and fits(one, text):
                    found.append(one)
    left_out = [_too_small(sizes, ranks, base.accumulate) for ranks, sizes in too_small.items()]
    if not found:
        raise UsageError(
            left_out[0] if left_out else f"there is nothing to measure on several ranks in {text}.",
            hint="use larger --sizes, or fewer ranks" if left_out else "name a strategy, for example ddp, or --ranks 1",
        )
    return Points(found, _shapes_of(found), left_out)


def without_too_large(points: Points, samples: int | None) -> Points:
    """Return the points whose batch is not larger than the training data; raise if none is left."""
    kept: list[CandidateConfig] = []
    error: UsageError | None = None
    dropped: dict[int, None] = {}
    for one in points.candidate_configs:
        try:
            check_batch_fits(one.config, one.shape.ranks, samples)
            kept.append(one)
        except UsageError as own:
            error = error or own
            dropped[one.config.global_batch(1)] = None
    if error is None or samples is None:
        return points
    if not kept:
        raise UsageError(error.message, hint="use smaller --sizes")
    sizes = join_names([whole(size) for size in dropped])
    verb, article = ("is", "a global batch") if len(dropped) == 1 else ("are", "global batches")
    note = (
        f"{article[0].upper()}{article[1:]} of {sizes} {verb} not measured: the training data has "
        f"{plural(samples, 'sample')}."
    )
    return Points(kept, _shapes_of(kept), [*points.left_out, note])


def _shapes_of(candidate_configs: Sequence[CandidateConfig]) -> list[Shape]:
    return list(dict.fromkeys(one.shape for one in candidate_configs))


def _too_small(sizes: Sequence[int], ranks: int, accumulate: int) -> str:
    pieces = plural(ranks, "rank") + (f" × {accumulate} micro-batches" if accumulate > 1 else "")
    named = join_names([whole(size) for size in sizes])
    article = "A batch" if len(sizes) == 1 else "Batches"
    verb = "is" if len(sizes) == 1 else "are"
    return f"{article} of {named} {verb} not measured on {pieces}: some would have no sample."
