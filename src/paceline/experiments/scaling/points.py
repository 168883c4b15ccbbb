"""The points of a scaling experiment: strategies at each shape of ranks, with the batch of strong or weak scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from paceline.config import RunConfig, ScaleConfig
from paceline.config.slow_ranks import check_slow_ranks
from paceline.errors import UsageError
from paceline.experiments.candidates import CandidateConfig, role_of
from paceline.experiments.checks import check_strategy, visible_gpus, why_left_out_of_sets
from paceline.experiments.names import check_names
from paceline.experiments.scaling.shapes import ALONE
from paceline.formatting import plural
from paceline.launch.launcher_process import Shape
from paceline.records.experiment.design import Candidate, CandidatePoint, PointMode
from paceline.records.settings import Settings
from paceline.strategies.base.strategy import uses_one_rank
from paceline.strategies.registry import BASELINE_STRATEGIES, create, parse_list, selected_by_set
from paceline.workloads.given_settings import check_needed

DEFAULT_STRATEGIES = "gather_scatter,p2p,allreduce,ddp"


@dataclass(frozen=True)
class ScaleBatches:
    """Batch sizes of a scaling experiment."""

    whole: int
    """Global batch of strong scaling."""
    share: int
    """Batch per rank of weak scaling."""

    @classmethod
    def of(cls, config: ScaleConfig, most_ranks: int) -> ScaleBatches:
        """Return both batches; if only one is given, the other makes them equal at the largest world size."""
        whole = config.batch or (config.batch_per_rank or 0) * most_ranks or 256
        return cls(whole, config.batch_per_rank or max(1, whole // most_ranks))

    def in_mode(self, mode: str, ranks: int) -> int:
        """Return the global batch at a world size."""
        return self.whole if mode == "strong" else self.share * ranks


@dataclass(frozen=True)
class Points:
    """Points to measure."""

    candidate_configs: list[CandidateConfig]
    """By ranks; those of one shape follow each other."""
    shapes: list[Shape]
    """Shapes of ranks, fewest ranks first."""
    left_out: list[str] = field(default_factory=list)
    """Sentences on points that do not fit, so that they are not measured."""

    @property
    def most_ranks(self) -> int:
        """Largest world size."""
        return max(shape.ranks for shape in self.shapes)


def make_points(base: RunConfig, config: ScaleConfig, shapes: Sequence[Shape]) -> list[CandidateConfig]:
    """Return every strategy at every point, checked, and the baseline on one rank; points of both modes appear once."""
    text = config.strategies or DEFAULT_STRATEGIES
    strategies = list(dict.fromkeys([*BASELINE_STRATEGIES, *parse_list(text)]))
    most_ranks = max(shape.ranks for shape in shapes)
    check_slow_ranks(base.slowed, most_ranks)  # At smaller world sizes the slowed ranks may not exist.
    batches = ScaleBatches.of(config, most_ranks)
    candidate_configs = []
    for shape in shapes:
        wholes = {mode: batches.in_mode(mode, shape.ranks) for mode in config.modes}
        for batch in dict.fromkeys(wholes.values()):
            mode = "both" if len(set(wholes.values())) < len(wholes) else next(m for m in wholes if wholes[m] == batch)
            for strategy in strategies:
                candidate_config = point_candidate(replace(base, strategy=strategy, batch=batch), shape, mode)
                if candidate_config is not None and fits(candidate_config, text):
                    candidate_configs.append(candidate_config)
    if not any(candidate_config.candidate.role != "baseline" for candidate_config in candidate_configs):
        raise UsageError(
            f"there is nothing to scale in {text}.",
            hint="name a strategy that trains on several ranks, for example ddp",
        )
    return candidate_configs


def point_candidate(config: RunConfig, shape: Shape, mode: str) -> CandidateConfig | None:
    """Return a strategy at a point; None for a strategy that trains in one process at more than one rank."""
    check_names(config)
    check_needed(config)
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    role = role_of(strategy, shape.ranks)
    if uses_one_rank(strategy, shape.ranks) and shape != ALONE:
        return None
    batch = config.global_batch(1)
    share = batch // shape.ranks if batch % shape.ranks == 0 else batch / shape.ranks
    point = CandidatePoint(
        mode=cast(PointMode, mode),
        ranks=shape.ranks,
        hosts=shape.hosts,
        ranks_per_host=shape.ranks_per_host,
        batch=batch,
        batch_per_rank=share,
    )
    name = f"{config.strategy} on {_format_shape(shape)}, batch {batch}"
    candidate = Candidate(name, config.strategy, role=role, lossless=strategy.lossless, point=point)
    return CandidateConfig(candidate, config, shape)


def fits(candidate_config: CandidateConfig, text: str) -> bool:
    """Whether the strategy supports the settings; raise if not, unless it came from a named set."""
    config = candidate_config.config
    config.global_batch(candidate_config.shape.ranks)  # Raises for a batch that is too small.
    strategy = create(config.strategy)
    by_set = candidate_config.candidate.role != "baseline" and selected_by_set(text, config.strategy)
    if by_set and why_left_out_of_sets(strategy, visible_gpus(config)) is not None:
        return False
    try:
        check_strategy(config, strategy, candidate_config.shape.ranks)
    except UsageError:
        if by_set:
            return False
        raise
    return True


def _format_shape(shape: Shape) -> str:
    ranks = plural(shape.ranks, "rank")
    return ranks if shape.hosts == 1 else f"{ranks} over {shape.hosts} hosts"


def shared_settings(settings: Settings) -> Settings:
    """Return the settings of one candidate that all share, for the record: each point has its strategy and batch."""
    own = {"strategy", *CandidatePoint.__struct_fields__}
    return {key: value for key, value in settings.items() if key not in own}
