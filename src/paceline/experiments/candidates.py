"""The candidates of a comparison: strategies, settings, or both, each with a unique name."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline.config import DEFAULT_STRATEGY, CompareConfig, RunConfig
from paceline.config.setting import metadata_of
from paceline.config.slow_ranks import NO_RANK, check_slow_ranks
from paceline.config.specs import convert, split_list
from paceline.errors import UsageError, unknown_name
from paceline.experiments.checks import check_strategy, visible_gpus, why_left_out_of_sets
from paceline.experiments.names import check_names
from paceline.launch.launcher_process import Shape
from paceline.records.experiment.design import Candidate, CandidateRole
from paceline.records.settings import Settings
from paceline.strategies.base.abilities import UsesAllGpus
from paceline.strategies.base.strategy import Strategy, uses_one_rank
from paceline.strategies.registry import create, parse_list, selected_by_set
from paceline.workloads.given_settings import check_needed


class CandidateRules(Protocol):
    """Rules on what may vary between candidates."""

    @property
    def fixed(self) -> Mapping[str, str]:
        """Settings that cannot be varied, and the hint to show."""

    def check_names(self, config: RunConfig) -> None:
        """Raise for unknown names."""

    def check_fit(self, config: RunConfig, strategy: Strategy, ranks: int) -> None:
        """Raise for a strategy that does not support the settings."""


class WorkloadRules:
    """Rules for workloads, which our own loop trains."""

    fixed: Mapping[str, str] = {
        name: metadata.fixed for name, metadata in metadata_of(RunConfig).items() if metadata.fixed
    }

    def check_names(self, config: RunConfig) -> None:
        check_names(config)
        check_needed(config)

    def check_fit(self, config: RunConfig, strategy: Strategy, ranks: int) -> None:
        check_strategy(config, strategy, ranks)


WORKLOAD_RULES = WorkloadRules()


@dataclass(frozen=True)
class CandidateConfig:
    """A candidate with the config and the shape of its runs."""

    candidate: Candidate
    config: RunConfig
    shape: Shape


def make_candidates(
    base: RunConfig, compare: CompareConfig, shape: Shape, rules: CandidateRules = WORKLOAD_RULES
) -> list[CandidateConfig]:
    """Return every strategy with every combination of the varied settings, checked, in the order given."""
    ranks = shape.ranks
    text = strategies_of(compare)
    strategies = parse_list(text)
    variations = list(_variations(compare, rules.fixed))
    base = _with_global_batch(base, ranks, varies={key for variation in variations for key in variation})
    several = len(set(strategies)) > 1 or not compare.vary
    candidate_configs: list[CandidateConfig] = []
    taken: dict[str, int] = {}
    for strategy_text, settings in itertools.product(strategies, variations):
        config = replace(base, strategy=strategy_text, **settings)
        rules.check_names(config)
        check_slow_ranks(config.slowed, ranks)
        strategy = create(strategy_text)
        if selected_by_set(text, strategy_text) and why_left_out_of_sets(strategy, visible_gpus(config)) is not None:
            continue
        try:
            rules.check_fit(config, strategy, ranks)
        except UsageError:
            if selected_by_set(text, strategy_text):
                continue
            raise
        words = [strategy_text] if several else []
        name = " ".join([*words, *[f"{key}={_format_value(value)}" for key, value in settings.items()]])
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name = f"{name} ({taken[name]})"
        candidate = Candidate(name, strategy_text, settings, role_of(strategy, ranks), strategy.lossless)
        candidate_configs.append(CandidateConfig(candidate, config, shape))
    if not candidate_configs:
        raise UsageError(f"none of {text} supports these settings.", hint="`paceline strategies` lists all strategies")
    return candidate_configs


def strategies_of(compare: CompareConfig) -> str:
    """Return the list of strategies that a comparison measures, which may name sets."""
    return compare.strategies or (DEFAULT_STRATEGY if compare.vary else "usual")


def _variations(compare: CompareConfig, fixed: Mapping[str, str]) -> Iterator[Settings]:
    """Yield every combination of the varied settings."""
    axes = [(key, _values(key, text, fixed)) for key, text in compare.varied]
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise UsageError(f"--vary names {keys[0]} twice.", hint="give all values of a setting at once: KEY=A,B,C")
    for values in itertools.product(*[values for _, values in axes]):
        yield dict(zip(keys, values, strict=True))


def varied_keys(compare: CompareConfig) -> set[str]:
    """Return the names of the settings that vary."""
    return {key for key, _ in compare.varied}


def _values(key: str, text: str, fixed: Mapping[str, str]) -> list[Any]:
    """Return the values of a varied setting."""
    if not text.strip():
        raise UsageError(f"--vary {key!r} names no values.", hint="write it as --vary KEY=A,B")
    kinds = typing.get_type_hints(RunConfig)
    if key in fixed:
        raise UsageError(f"--vary cannot vary {key}.", hint=fixed[key])
    if key not in kinds:
        raise unknown_name("setting", key, kinds.keys() - fixed.keys())
    values = ["", *split_list(text)] if text.lstrip().startswith(",") else split_list(text)
    return [convert(kinds[key], value, f"--vary {key}") for value in values]


def _with_global_batch(config: RunConfig, ranks: int, varies: set[str]) -> RunConfig:
    """Convert --batch-per-rank to a global batch, so that all candidates, `single` too, train on the same batch."""
    if "batch" in varies or config.batch_per_rank is None:
        return replace(config, batch_per_rank=None)
    return replace(config, batch=config.batch_per_rank * ranks, batch_per_rank=None)


def role_of(strategy: Strategy, ranks: int) -> CandidateRole:
    """Return the role of a strategy in an experiment."""
    if not strategy.exchanges:
        return "bound"
    is_baseline = uses_one_rank(strategy, ranks) and not isinstance(strategy, UsesAllGpus)
    return "baseline" if is_baseline else "candidate"


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or NO_RANK


def shared_settings(settings: Settings, candidate_configs: Sequence[CandidateConfig]) -> Settings:
    """Return the settings of one candidate that all candidates share, for the record."""
    varied = {
        "strategy",
        *[key for candidate_config in candidate_configs for key in candidate_config.candidate.settings],
    }
    return {key: value for key, value in settings.items() if key not in varied}
