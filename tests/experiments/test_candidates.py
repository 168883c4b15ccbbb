"""What is compared, from what was typed."""

from __future__ import annotations

import pytest

from paceline.analysis.record_set import reference_of
from paceline.config import CompareConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.candidates import make_candidates
from paceline.launch.launcher_process import Shape
from paceline.strategies.registry import SETS


def names(run: RunConfig | None = None, ranks: int = 2, **compare: object) -> list[str]:
    candidate_configs = make_candidates(run or RunConfig(), CompareConfig(**compare), Shape(1, ranks))  # type: ignore[arg-type]
    return [candidate_config.candidate.name for candidate_config in candidate_configs]


def test_the_default_is_the_classic_set_and_what_may_beat_it() -> None:
    assert names() == list(SETS["usual"])
    assert set(names()) > set(SETS["classic"])


def test_the_same_twice_gets_two_names() -> None:
    assert names(strategies="ddp,ddp,ddp:bucket_mb=1") == ["ddp", "ddp (2)", "ddp:bucket_mb=1"]


def test_varying_a_setting_compares_it_under_ddp() -> None:
    assert names(vary=("bn=local,sync",)) == ["bn=local", "bn=sync"]
    assert names(vary=("bn=local,sync", "batch=8,16")) == [
        "bn=local batch=8",
        "bn=local batch=16",
        "bn=sync batch=8",
        "bn=sync batch=16",
    ]


def test_strategies_and_settings_multiply() -> None:
    assert names(strategies="ddp,allreduce", vary=("reshuffle=on,off",)) == [
        "ddp reshuffle=true",
        "ddp reshuffle=false",
        "allreduce reshuffle=true",
        "allreduce reshuffle=false",
    ]


def test_values_have_the_types_of_their_setting() -> None:
    candidate_configs = make_candidates(RunConfig(), CompareConfig(vary=("clip-norm=1,none", "lr=0.1")), Shape(1, 2))
    assert [candidate_config.config.clip_norm for candidate_config in candidate_configs] == [1.0, None]
    assert candidate_configs[0].config.lr == 0.1


def test_single_gets_the_global_batch_too() -> None:
    candidate_configs = make_candidates(
        RunConfig(batch_per_rank=16), CompareConfig(strategies="single,ddp"), Shape(1, 4)
    )
    assert [
        candidate_config.config.global_batch(workers)
        for candidate_config, workers in zip(candidate_configs, (1, 4), strict=True)
    ] == [64, 64]


def test_the_reference_is_ddp_else_the_first_that_could_be_picked() -> None:
    def reference(**compare: object) -> str:
        candidate_configs = make_candidates(RunConfig(), CompareConfig(**compare), Shape(1, 2))  # type: ignore[arg-type]
        return reference_of([candidate_config.candidate for candidate_config in candidate_configs]).name

    assert reference(strategies="single,allreduce,ddp:bucket_mb=1,ddp") == "ddp"
    assert reference(strategies="single,allreduce,p2p") == "allreduce"
    assert reference(strategies="none") == "none"
    assert reference(vary=("bn=sync,local",)) == "bn=sync"


@pytest.mark.parametrize(
    ("vary", "found", "hint"),
    [
        (("bn",), "names no values", "KEY=A,B"),
        (("bn=",), "names no values", "KEY=A,B"),
        (("bm=local",), "there is no setting 'bm'", "did you mean 'bn'"),
        (("bn=locale",), "cannot be 'locale'", "did you mean 'local'"),
        (("batch=many",), "not valid", "a whole number"),
        (("seed=1,2",), "cannot vary seed", "own seed"),
        (("strategy=ddp",), "cannot vary strategy", "--strategies"),
        (("log_every=5,20",), "cannot vary log_every", "length of the timed windows"),
        (("bn=local", "bn=sync"), "names bn twice", "at once"),
    ],
)
def test_what_cannot_be_varied_is_said(vary: tuple[str, ...], found: str, hint: str) -> None:
    with pytest.raises(UsageError, match=found) as caught:
        names(vary=vary)
    assert hint in (caught.value.hint or "")


def test_unknown_strategies_and_batches_that_are_too_small_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no strategy 'dpp'"):
        names(strategies="dpp")
    with pytest.raises(UsageError, match="without a sample"):
        names(RunConfig(batch=2), ranks=4, strategies="ddp")


def test_a_set_leaves_out_what_does_not_fit() -> None:
    assert names(RunConfig(batch=2), ranks=4) == ["single"]
