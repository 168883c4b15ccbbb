"""The two configs: what they are by default, what they refuse, and how a TOML file becomes one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from paceline.config import BatchConfig, CompareConfig, LaunchConfig, RunConfig, ScaleConfig
from paceline.config.fields import field_docs, from_mapping, read_toml
from paceline.config.recipe import RECIPE_SETTINGS
from paceline.errors import UsageError


def test_the_defaults_are_the_classic_experiment_trained_by_the_recipe_of_the_workload() -> None:
    config = RunConfig()
    assert {getattr(config, name) for name in RECIPE_SETTINGS} == {None}, "the recipe sets them"
    assert config.global_batch(workers=4) == 256
    assert (config.workload, config.data, config.strategy, config.seed) == ("cnn", "digits", "ddp", 0)
    assert (config.accumulate, config.bn, config.reshuffle) == (1, "broadcast", True)


@pytest.mark.parametrize("kind", [RunConfig, LaunchConfig, CompareConfig, ScaleConfig, BatchConfig])
def test_every_field_is_explained(kind: type) -> None:
    docs = field_docs(kind)
    assert docs.keys() == {field.name for field in fields(kind)}
    assert all(len(doc) > 10 for doc in docs.values())


def test_field_docs_reads_only_the_text_right_below_a_field() -> None:
    assert field_docs(Documented) == {"first": "About the first,\non two lines.", "third": "About the third."}


@dataclass
class Documented:
    """Not a field's."""

    first: int = 1
    """About the first,
    on two lines."""
    second: int = 2
    third: int = 3
    """About the third."""

    def method(self) -> None:
        """Not a field's either."""


@pytest.mark.parametrize("every", ["0", "-3", "1.5", "x", "Epoch", "epochs", "1,2", " "])
def test_evaluations_follow_a_number_of_steps_or_epochs(every: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunConfig(eval_every=every)
    assert caught.value.message == f"--eval-every is {every!r}."
    assert caught.value.hint is not None
    assert "--eval-every epoch" in caught.value.hint


def test_evaluations_while_training(tmp_path: Path) -> None:
    assert [RunConfig(eval_every=every).eval_steps for every in ("", "50", "epoch")] == [None, 50, None]
    assert read_toml(written(tmp_path, "eval_every = 50"), RunConfig) == {"eval_every": "50"}
    with pytest.raises(UsageError) as caught:
        RunConfig(eval_every="epoch", evaluate=False)
    assert caught.value.message == "--eval-every was given with --no-evaluate."


POSITIVE = ["batch", "batch_per_rank", "accumulate", "epochs", "steps", "seconds", "log_every", "timeout", "clip_norm"]
NOT_NEGATIVE = ["lr", "momentum", "weight_decay", "seed"]


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_what_has_to_be_positive(name: str, value: int) -> None:
    with pytest.raises(UsageError) as caught:
        RunConfig(**{name: value})
    assert caught.value.message == f"--{name.replace('_', '-')} is {value}."
    assert caught.value.hint == "it must be more than 0"


@pytest.mark.parametrize("name", NOT_NEGATIVE)
def test_what_may_be_zero_but_not_less(name: str) -> None:
    assert getattr(RunConfig(**{name: 0}), name) == 0
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is -1"):
        RunConfig(**{name: -1})


def test_a_learning_rate_is_a_number() -> None:
    with pytest.raises(UsageError, match="--lr is nan"):
        RunConfig(lr=math.nan)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("bn", "sinc", "sync"),
        ("precision", "bf61", "bf16"),
        ("device", "gpu", "cpu"),
        ("backend", "glo", "gloo"),
    ],
)
def test_choices_offer_the_nearest(name: str, value: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"--{name} cannot be '{value}'") as caught:
        RunConfig(**{name: value})
    assert f"did you mean '{near}'?" in (caught.value.hint or "")


def test_both_ways_to_say_the_batch_at_once_are_refused() -> None:
    with pytest.raises(UsageError, match="--batch and --batch-per-rank were both given"):
        RunConfig(batch=64, batch_per_rank=16)


@pytest.mark.parametrize(
    ("settings", "workers", "batch"),
    [
        ({"batch": 64}, 3, 64),
        ({"batch_per_rank": 64}, 3, 192),
        ({"batch_per_rank": 1}, 1, 1),
        ({"batch": 12, "accumulate": 4}, 3, 12),
        ({}, 256, 256),
    ],
)
def test_global_batch(settings: dict[str, int], workers: int, batch: int) -> None:
    assert RunConfig(**settings).global_batch(workers) == batch


def test_global_batch_refuses_to_leave_a_rank_empty() -> None:
    with pytest.raises(UsageError, match="a global batch of 3 leaves some of the 4 ranks without a sample") as caught:
        RunConfig(batch=3).global_batch(4)
    assert "--batch 4 or more" in (caught.value.hint or "")


def test_global_batch_refuses_to_leave_a_micro_batch_empty() -> None:
    with pytest.raises(UsageError, match="2 ranks × 3 micro-batches") as caught:
        RunConfig(batch=5, accumulate=3).global_batch(2)
    assert "--batch 6 or more" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="leaves some"):
        RunConfig(batch_per_rank=1, accumulate=2).global_batch(2)


@pytest.mark.parametrize("settings", [{"steps": 3}, {"epochs": 1}, {"seconds": 0.5}])
def test_settings_that_give_a_run_its_length(settings: dict[str, Any]) -> None:
    assert RunConfig(**settings).has_length
    assert not RunConfig(batch=64).has_length


@pytest.mark.parametrize(
    ("settings", "default", "ranks"),
    [
        ({}, 2, 2),
        ({"ranks": 5}, 2, 5),
        ({"ranks_per_host": 3}, 2, 3),
        ({"ranks": 6, "hosts": 2, "master": "h:1"}, 1, 3),
        ({"ranks": 6, "ranks_per_host": 3, "hosts": 2, "node_rank": 1, "master": "h:1"}, 1, 3),
        ({"hosts": 4, "node_rank": 3, "master": "h:1"}, 8, 8),
    ],
)
def test_local_ranks(settings: dict[str, Any], default: int, ranks: int) -> None:
    assert LaunchConfig(**settings).local_ranks(default) == ranks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "--ranks is 0"),
        ({"ranks_per_host": 0}, "--ranks-per-host is 0"),
        ({"hosts": 0}, "--hosts is 0"),
        ({"threads": 0}, "--threads is 0"),
        ({"node_rank": 1}, "--node-rank 1 is not one of 1 hosts"),
        ({"node_rank": -1}, "--node-rank -1 is not"),
        ({"hosts": 2, "master": "h:1", "node_rank": 2}, "--node-rank 2 is not one of 2 hosts"),
        ({"hosts": 2, "master": "h:1", "ranks": 3}, "3 ranks do not divide over 2 hosts"),
        ({"ranks": 4, "ranks_per_host": 3}, "--ranks 4 is not 1 hosts × --ranks-per-host 3"),
        ({"ranks": 4, "ranks_per_host": 4, "hosts": 2, "master": "h:1"}, "--ranks 4 is not 2 hosts"),
    ],
)
def test_launches_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        LaunchConfig(**settings)
    assert caught.value.hint


def written(folder: Path, text: str) -> Path:
    file = folder / "settings.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_read_toml(tmp_path: Path) -> None:
    file = written(
        tmp_path, 'strategy = "p2p"\nbatch-per-rank = 32\nlr = 1\nreshuffle = false\nbn = "sync"\nranks = 3\n'
    )
    assert read_toml(file, RunConfig, LaunchConfig) == {
        "strategy": "p2p",
        "batch_per_rank": 32,
        "lr": 1,
        "reshuffle": False,
        "bn": "sync",
        "ranks": 3,
    }


def test_read_toml_knows_only_the_kinds_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no setting"):
        read_toml(written(tmp_path, "ranks = 3"), RunConfig)


@pytest.mark.parametrize(
    ("line", "counts"), [("ranks = 2", (2,)), ("ranks = [4, 1]", (1, 4)), ('ranks = "1,2"', (1, 2))]
)
def test_world_sizes_may_be_numbers(tmp_path: Path, line: str, counts: tuple[int, ...]) -> None:
    assert (
        from_mapping(ScaleConfig, read_toml(written(tmp_path, line), ScaleConfig, LaunchConfig)).rank_counts == counts
    )


@pytest.mark.parametrize("line", ["ranks = 2.5", "ranks = true", 'ranks = [1, "2"]'])
def test_world_sizes_are_whole_numbers(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="ranks in ") as caught:
        read_toml(written(tmp_path, line), ScaleConfig)
    assert caught.value.hint == "it takes text, a whole number or a list of them"


def test_read_toml_offers_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no setting \(in .*settings.toml\) 'batch_pr_rank'") as caught:
        read_toml(written(tmp_path, "batch_pr_rank = 3"), RunConfig)
    assert "did you mean 'batch_per_rank'?" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('batch = "256"', "a whole number"),
        ("batch = 2.5", "a whole number"),
        ("batch = true", "a whole number"),
        ('lr = "fast"', "a number"),
        ("augment = 1", "true or false"),
        ("strategy = 3", "text"),
        ("bn = 3", "text"),
        ("batch = [1, 2]", "a whole number"),
    ],
)
def test_read_toml_names_the_wrong_type(tmp_path: Path, line: str, expected: str) -> None:
    with pytest.raises(UsageError, match=f"{line.split()[0]} in .*settings.toml is") as caught:
        read_toml(written(tmp_path, line), RunConfig)
    assert caught.value.hint == f"it takes {expected}"


def test_read_toml_says_where_the_text_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not valid TOML: .*line 2"):
        read_toml(written(tmp_path, "batch = 1\nlr = = 2"), RunConfig)


def test_read_toml_refuses_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_bytes(b"\xff\xfe\x00batch")
    with pytest.raises(UsageError, match=r"settings\.toml is not UTF-8 text: byte 0xff at position 0\."):
        read_toml(tmp_path / "settings.toml", RunConfig)


def test_read_toml_says_that_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none.toml: No such file"):
        read_toml(tmp_path / "none.toml", RunConfig)


def test_from_mapping_takes_its_own_and_leaves_the_rest() -> None:
    values = {"batch": 64, "lr": None, "ranks": 3, "augment": False}
    assert from_mapping(RunConfig, values) == RunConfig(batch=64, augment=False)
    assert from_mapping(LaunchConfig, values) == LaunchConfig(ranks=3)


@pytest.mark.parametrize(
    ("text", "steps"), [("", range(0)), ("20", range(20, 21)), ("20-22", range(20, 23)), (" 0 - 1", range(2))]
)
def test_steps_to_profile(text: str, steps: range) -> None:
    assert RunConfig(profile=text).profiled_steps == steps


@pytest.mark.parametrize("text", ["x", "-3", "3-", "3-x", "1.5", "3-4-5", "٣x"])
def test_steps_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="--profile is") as caught:
        RunConfig(profile=text)
    assert caught.value.hint == "write one step as 20, or a range as 20-22"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("22-20", "--profile '22-20' ends before it begins"),
        ("0-50", "--profile 0-50 names 51 steps"),
        ("9-10", "--profile 9-10 is outside the run's 10 steps"),
    ],
)
def test_steps_that_cannot_be_profiled(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunConfig(profile=text, steps=10)
    assert RunConfig(profile="8-9", steps=10).profiled_steps == range(8, 10)


def test_numbers_of_ranks_are_read_in_any_order() -> None:
    config = ScaleConfig(ranks=" 4,1, 2,4", ranks_per_host="2,1", mode="weak, strong")
    assert (config.rank_counts, config.per_host, config.modes) == ((1, 2, 4), (1, 2), ("strong", "weak"))
    assert config.max_repeats == config.repeats == 3


@pytest.mark.parametrize(
    ("given", "repeats", "max_repeats"),
    [
        ({}, 3, 10),
        ({"max_repeats": 1}, 1, 1),
        ({"repeats": 20}, 20, 20),
        ({"repeats": 5, "max_repeats": 2}, 2, 2),
        ({"repeats": 2, "max_repeats": 4}, 2, 4),
    ],
)
def test_the_most_repeats_limit_the_repeats(given: dict[str, int], repeats: int, max_repeats: int) -> None:
    config = CompareConfig(**given).with_consistent_repeats()  # type: ignore[arg-type]
    assert (config.repeats, config.max_repeats) == (repeats, max_repeats)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": "1,2.5"}, "--ranks '1,2.5' is not a list of positive numbers: '2.5'"),
        ({"ranks": "0"}, "--ranks '0' is not a list of positive numbers"),
        ({"ranks_per_host": "x"}, "--ranks-per-host 'x' is not a list"),
        ({"mode": "stronk"}, "--mode"),
        ({"mode": ","}, "--mode names no kind of scaling"),
        ({"batch_per_rank": 0}, "--batch-per-rank is 0"),
    ],
)
def test_what_cannot_be_scaled_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ScaleConfig(**settings)
