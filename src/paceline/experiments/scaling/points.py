"""What `scale` measures: strategies on shapes of ranks, with the batches that a kind of scaling gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import RunConfig, ScaleConfig
from paceline.config.slow_ranks import check_slow_ranks
from paceline.errors import UsageError
from paceline.experiments.candidates import CandidateConfig, role_of
from paceline.experiments.checks import check_strategy
from paceline.experiments.names import check_names
from paceline.experiments.scaling.shapes import ALONE
from paceline.launch.launcher_process import Shape
from paceline.records.experiment import Candidate
from paceline.strategies.registry import create, parse_list, selected_by_set

DEFAULT_STRATEGIES = "gather_scatter,p2p,allreduce,ddp"
BASELINE = "single"


@dataclass(frozen=True)
class ScaleBatches:
    """The batches of an experiment."""

    whole: int
    """Of strong scaling, over all ranks."""
    share: int
    """Of weak scaling, on each rank."""

    @classmethod
    def of(cls, config: ScaleConfig, most_ranks: int) -> ScaleBatches:
        """Where only one was named, the other is such that both kinds of scaling meet on the most ranks."""
        whole = config.batch or (config.batch_per_rank or 0) * most_ranks or 256
        return cls(whole, config.batch_per_rank or max(1, whole // most_ranks))

    def in_mode(self, mode: str, ranks: int) -> int:
        """The global batch on so many ranks."""
        return self.whole if mode == "strong" else self.share * ranks


def make_points(base: RunConfig, config: ScaleConfig, shapes: Sequence[Shape]) -> list[CandidateConfig]:
    """Every strategy at every point, checked; `single` on one rank. What two kinds of scaling share is there once."""
    text = config.strategies or DEFAULT_STRATEGIES
    strategies = [BASELINE, *[name for name in dict.fromkeys(parse_list(text)) if name != BASELINE]]
    most_ranks = max(shape.ranks for shape in shapes)
    check_slow_ranks(base.slowed, most_ranks)  # Where there are fewer, they are all as fast.
    batches = ScaleBatches.of(config, most_ranks)
    candidate_configs = []
    for shape in shapes:
        wholes = {mode: batches.in_mode(mode, shape.ranks) for mode in config.modes}
        for batch in dict.fromkeys(wholes.values()):
            mode = "both" if len(set(wholes.values())) < len(wholes) else next(m for m in wholes if wholes[m] == batch)
            for strategy in strategies:
                candidate_config = _candidate_config(replace(base, strategy=strategy, batch=batch), shape, mode)
                if candidate_config is not None and _fits(candidate_config, text):
                    candidate_configs.append(candidate_config)
    if not any(candidate_config.candidate.role != "baseline" for candidate_config in candidate_configs):
        raise UsageError(f"there is nothing to scale in {text}.", hint="name a strategy that shares the work, as ddp")
    return candidate_configs


def _candidate_config(config: RunConfig, shape: Shape, mode: str) -> CandidateConfig | None:
    """A strategy at a point; None where it has no part: what trains in one process takes one rank."""
    check_names(config)
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    role = role_of(strategy, shape.ranks)
    if role == "baseline" and shape != ALONE:
        return None
    batch = config.global_batch(1)
    share = batch // shape.ranks if batch % shape.ranks == 0 else batch / shape.ranks
    point = {"mode": mode, "ranks": shape.ranks, "hosts": shape.hosts, "ranks_per_host": shape.ranks_per_host}
    point |= {"batch": batch, "batch_per_rank": share}
    name = f"{config.strategy} on {_in_words(shape)}, batch {batch}"
    candidate = Candidate(name, config.strategy, role=role, lossless=strategy.lossless, point=point)
    return CandidateConfig(candidate, config, shape)


def _fits(candidate_config: CandidateConfig, text: str) -> bool:
    """Whether the settings suit the strategy; one that was meant by a set alone is left out where they do not."""
    candidate_config.config.global_batch(
        candidate_config.shape.ranks
    )  # A batch that is too small is refused, whoever has it.
    try:
        check_strategy(candidate_config.config, create(candidate_config.config.strategy), candidate_config.shape.ranks)
    except UsageError:
        if candidate_config.candidate.role != "baseline" and selected_by_set(text, candidate_config.config.strategy):
            return False
        raise
    return True


def _in_words(shape: Shape) -> str:
    ranks = "1 rank" if shape.ranks == 1 else f"{shape.ranks} ranks"
    return ranks if shape.hosts == 1 else f"{ranks} over {shape.hosts} hosts"


def shared_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Of one entrant's settings those that all have, for the record."""
    return {key: value for key, value in settings.items() if key not in ("strategy", "batch", "batch_per_rank")}
