"""Exception tree: one exit code per branch; errors for unknown names and invalid choices."""

from __future__ import annotations

import inspect
import re

import pytest

from paceline import errors
from paceline.errors import ERRORS_BY_NAME, PacelineError, UsageError, unknown_name, wrong_choice

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PacelineError)]


def test_every_branch_has_a_different_exit_code() -> None:
    codes = [kind.exit_code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes
    assert not {errors.INTERRUPTED_EXIT_CODE, errors.PROBLEM_EXIT_CODE} & set(codes)


def test_the_docstring_shows_the_whole_tree() -> None:
    drawn = dict(re.findall(r"(\w+Error)\s+(\d+)\s", errors.__doc__ or ""))
    assert {name: int(code) for name, code in drawn.items()} == {kind.__name__: kind.exit_code for kind in KINDS}


def test_errors_by_name_has_the_whole_tree() -> None:
    assert {kind.__name__: kind for kind in KINDS} == ERRORS_BY_NAME


def test_an_error_keeps_message_hint_and_detail() -> None:
    error = UsageError("it is so.", hint="do this", detail="Traceback")
    assert (str(error), error.message, error.hint, error.detail) == ("it is so.", "it is so.", "do this", "Traceback")
    assert UsageError("x").hint is None
    assert UsageError("x").detail is None


def test_input_that_an_error_quotes_cannot_control_the_terminal() -> None:
    error = UsageError("it is \x1b[2J.", hint="not \x07")
    assert (str(error), error.message, error.hint) == (r"it is \x1b[2J.", r"it is \x1b[2J.", r"not \x07")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dpd", "did you mean 'ddp'? known: allreduce, ddp"),
        ("alreduce", "did you mean 'allreduce'? known: allreduce, ddp"),
        ("zzz", "known: allreduce, ddp"),
    ],
)
def test_unknown_name_suggests_the_closest_and_then_all(name: str, hint: str) -> None:
    error = unknown_name("strategy", name, ["ddp", "allreduce"])
    assert isinstance(error, UsageError)
    assert error.message == f"there is no strategy {name!r}."
    assert error.hint == hint


@pytest.mark.parametrize(
    ("name", "nearest"), [("dpp", "ddp"), ("pdd", "ddp"), ("gather", "gather_scatter"), ("rign", "ring")]
)
def test_the_suggestion_needs_the_fewest_changes_of_letters(name: str, nearest: str) -> None:
    error = unknown_name("strategy", name, ["p2p", "ddp", "gather_scatter", "ring", "priority", "single", "none"])
    assert (error.hint or "").startswith(f"did you mean {nearest!r}? ")


def test_wrong_choice_names_the_option_and_its_choices() -> None:
    error = wrong_choice("--bn", "sinc", ("sync", "local"))
    assert error.message == "--bn cannot be 'sinc'."
    assert error.hint == "did you mean 'sync'? choices: local, sync"
