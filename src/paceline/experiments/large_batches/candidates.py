"""The reference and the large batches as candidates: each differs from the reference in batch and remedies alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.config import LargeBatchConfig, RunConfig
from paceline.config.large_batch import DEFAULT_FACTORS, DEFAULT_REMEDIES, Remedy, Variant, variant_name
from paceline.config.recipe import OPTIMIZER_SETTINGS, Recipe
from paceline.errors import UsageError
from paceline.experiments.candidates import WORKLOAD_RULES, CandidateConfig, role_of
from paceline.experiments.large_batches.trained_workload import TrainedWorkload
from paceline.formatting import join_names, plural, whole
from paceline.launch.launcher_process import Shape
from paceline.records.experiment.design import Candidate, LargeBatchVariant
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create

LARS_REFERENCE_BATCH = Recipe().reference_batch
"""Batch that the learning rate of LARS in `OPTIMIZER_SETTINGS` is meant for."""
REFERENCE = "reference"


@dataclass(frozen=True)
class LargeBatchCandidates:
    """Candidates of an experiment, the reference first."""

    candidate_configs: list[CandidateConfig]
    sizes: list[int]
    """Large batches, ascending."""
    left_out: list[str]
    """Sentences on batches and remedies that are not tried."""

    @property
    def reference(self) -> CandidateConfig:
        """Candidate that the others are compared with."""
        return self.candidate_configs[0]


def make_large_batch_candidates(
    base: RunConfig, config: LargeBatchConfig, workload: TrainedWorkload, shape: Shape, micro_batch: int
) -> LargeBatchCandidates:
    """Return the candidates, checked. `base` has a length in epochs."""
    sizes, notes = _choose_sizes(config, workload)
    remedies, more = _choose_remedies(config, workload)
    plain = _plain_config(base, config, workload.recipe)
    changes = _changes(config, plain.most_epochs, workload.recipe)
    variants: list[tuple[int, Variant]] = [(config.reference, ())]
    variants += [(size, variant) for size in sizes for variant in config.variants(remedies)]
    strategy = create(base.strategy, allow_unused=base.allow_unused)
    workers = strategy.roles(shape.ranks).count(Role.WORKER)
    found = []
    for number, (batch, variant) in enumerate(variants):
        own = replace(plain, batch=batch)
        for remedy in variant:
            own = changes[remedy](own)
        passes = -(-batch // (workers * micro_batch))
        if number == 0 and workers == 1 and config.noise_scale != "off":
            passes = max(2, passes)  # One gradient per step has nothing to be compared with.
        own = replace(own, accumulate=passes)
        WORKLOAD_RULES.check_names(own)
        WORKLOAD_RULES.check_fit(own, strategy, shape.ranks)
        candidate = Candidate(
            f"{batch} {variant_name(variant) if number else REFERENCE}",
            base.strategy,
            _settings(own, plain),
            role_of(strategy, shape.ranks),
            strategy.lossless,
            variant=LargeBatchVariant(batch=batch, remedies=list(variant)),
        )
        found.append(CandidateConfig(candidate, own, shape))
    return LargeBatchCandidates(found, sizes, [*notes, *more])


def _choose_sizes(config: LargeBatchConfig, workload: TrainedWorkload) -> tuple[list[int], list[str]]:
    """Return the large batches that the data has enough samples for, and a sentence on the others."""
    wanted = config.sizes or tuple(factor * config.reference for factor in DEFAULT_FACTORS)
    samples = workload.samples
    sizes = [size for size in wanted if samples is None or size <= samples]
    dropped = [whole(size) for size in wanted if size not in sizes]
    if not dropped or samples is None:
        return sizes, []
    what, verb = ("A batch", "is") if len(dropped) == 1 else ("Batches", "are")
    note = f"{what} of {join_names(dropped)} {verb} not tried: the training data has {plural(samples, 'sample')}."
    if not sizes:
        raise UsageError(
            f"the training data has {plural(samples, 'sample')}, fewer than a batch of {whole(min(wanted))}.",
            hint="name smaller batches with --large, or a smaller --reference",
        )
    return sizes, [note] if config.sizes else []


def _choose_remedies(config: LargeBatchConfig, workload: TrainedWorkload) -> tuple[tuple[Remedy, ...], list[str]]:
    """Return the remedies to try by default, and a sentence on each that has no effect; raise if the user named it."""
    reasons: dict[Remedy, str] = {}
    if not workload.has_residual_norms:
        reasons["zero-gamma"] = "the model has no residual block that ends in a BatchNorm"
    if workload.recipe.optimizer == "lars":
        reasons["lars"] = "the recipe has that optimiser already"
    for remedy, reason in reasons.items():
        if config.remedies and any(remedy in variant for variant in config.variants(())):
            raise UsageError(f"{remedy} has no effect: {reason}.", hint=f"leave {remedy} out of --remedies")
    notes = [] if config.remedies else [f"{remedy} is not tried: {reason}." for remedy, reason in reasons.items()]
    return tuple(remedy for remedy in DEFAULT_REMEDIES if remedy not in reasons), notes


def _plain_config(base: RunConfig, config: LargeBatchConfig, recipe: Recipe) -> RunConfig:
    """Return the config of training without remedies: at every batch, the learning rate of the reference."""
    return replace(
        base,
        batch=config.reference,
        lr=recipe.peak_lr(config.reference),
        warmup_epochs=0.0,
        zero_gamma=False if recipe.zero_gamma else None,
        noise_scale=config.noise_scale,
    )


def _changes(
    config: LargeBatchConfig, epochs: int, recipe: Recipe
) -> Mapping[Remedy, Callable[[RunConfig], RunConfig]]:
    """Return what each remedy changes in the config of plain training."""
    lars = OPTIMIZER_SETTINGS["lars"]
    return {
        "linear": lambda own: replace(own, scale_lr="linear", reference_batch=config.reference),
        "sqrt": lambda own: replace(own, scale_lr="sqrt", reference_batch=config.reference),
        "warmup": lambda own: replace(own, warmup_epochs=config.warmup_length(epochs)),
        "zero-gamma": lambda own: replace(own, zero_gamma=True),
        "lars": lambda own: replace(
            own,
            optimizer="lars",
            lr=lars["lr"],
            scale_lr=lars["scale_lr"],
            reference_batch=LARS_REFERENCE_BATCH,
            weight_decay=recipe.weight_decay,
        ),
    }


def _settings(own: RunConfig, plain: RunConfig) -> dict[str, Any]:
    """Return the settings in which a candidate differs from the reference, for the record: always its batch."""
    differing = {
        one.name: getattr(own, one.name)
        for one in fields(RunConfig)
        if getattr(own, one.name) != getattr(plain, one.name)
    }
    return {"batch": own.batch} | differing
