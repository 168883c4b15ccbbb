"""Tests of the parts of a start-up."""

from __future__ import annotations

import time

import pytest

from paceline.measure.start_up import StartUp


def test_each_part_lasts_from_the_end_of_the_one_before() -> None:
    start_up = StartUp()
    start_up.begin(time.time() - 5)
    start_up.end_of("starting processes")
    start_up.end_of("importing torch")
    parts = start_up.parts()
    assert list(parts) == ["starting processes", "importing torch"]
    assert parts["starting processes"] == pytest.approx(5, abs=1)
    assert parts["importing torch"] < 1


def test_the_next_run_begins_anew() -> None:
    start_up = StartUp()
    start_up.end_of("starting processes")
    start_up.begin(time.time())
    assert start_up.parts() == {}


def test_a_clock_that_is_set_back_gives_no_negative_time() -> None:
    start_up = StartUp()
    start_up.begin(time.time() + 60)
    start_up.end_of("starting processes")
    assert start_up.parts() == {"starting processes": 0}
