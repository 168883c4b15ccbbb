"""Which ranks are slowed on purpose: what may be written, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from paceline.cli.main import run
from paceline.config import RunConfig
from paceline.config.slow_ranks import check_slow_ranks, format_slow_ranks, parse_slow_ranks
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("none", {}),
        ("1:3", {1: 3.0}),
        ("1:3, 2:1.5", {1: 3.0, 2: 1.5}),
        ("1:3+2:1.5", {1: 3.0, 2: 1.5}),
        ("0:1", {0: 1.0}),
    ],
)
def test_ranks_and_factors_are_read(text: str, found: dict[int, float]) -> None:
    assert RunConfig(slow_rank=text).slowed == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1", "is not a rank with a factor: '1'"),
        ("1:3,", "with a factor: ''"),
        ("a:3", "with a factor: 'a:3'"),
        ("1:fast", "with a factor: '1:fast'"),
        ("1:nan", "with a factor: '1:nan'"),
        ("-1:3", "with a factor: '-1:3'"),
        ("1:0.5", "rank 1 0.5 times as slow"),
        ("1:3,1:2", "names rank 1 twice"),
    ],
)
def test_what_cannot_be_is_refused(text: str, found: str) -> None:
    with pytest.raises(UsageError) as error:
        RunConfig(slow_rank=text)
    assert found in error.value.message
    assert error.value.hint


def test_a_rank_has_to_be_there() -> None:
    check_slow_ranks({3: 2.0}, 4)
    with pytest.raises(UsageError, match="names rank 4, but there are ranks 0 to 3"):
        check_slow_ranks({0: 2.0, 4: 2.0}, 4)
    with pytest.raises(UsageError, match="there is only rank 0"):
        check_slow_ranks({1: 2.0}, 1)


def test_sentences_name_those_that_are_slower() -> None:
    assert format_slow_ranks({}) == format_slow_ranks({1: 1.0}) == ""
    assert format_slow_ranks(parse_slow_ranks("1:3,0:1")) == "rank 1 was slowed down 3×"
    assert format_slow_ranks({2: 1.5, 0: 2.0}) == "rank 0 was slowed down 2× and rank 2 was slowed down 1.5×"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("train cnn --ranks 2 --slow-rank 2:3", "there are ranks 0 to 1"),
        ("train cnn --strategy single --ranks 2 --slow-rank 1:3", "does not train under single"),
        ("compare cnn --ranks 2 --slow-rank 2:3", "there are ranks 0 to 1"),
        ("compare cnn --ranks 2 --vary slow_rank=none,5:2", "names rank 5"),
        ("scale cnn --ranks 1,2 --slow-rank 2:3", "there are ranks 0 to 1"),
    ],
)
def test_every_command_refuses_a_rank_that_is_not_there(
    command: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command.split()) == 2
    assert found in " ".join(capsys.readouterr().err.split())
