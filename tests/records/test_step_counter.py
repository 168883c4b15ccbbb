"""Tests of the count of steps that survives a killed process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.records.resumed import read_history
from paceline.records.schema import EVENTS_FILE, STEP_COUNT_FILE
from paceline.records.step_counter import StepCounter, read_step_count

LOG = '{"event":"log","time_s":1.0,"epoch":1,"step":20,"wall_s":1.0,"losses":[0.5],"samples":8,"correct":null}\n'


def test_the_count_survives_a_killed_process(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        counter = StepCounter(tmp_path, 20)
        for _ in range(7):
            counter.count()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert read_step_count(tmp_path) == 27


def test_a_history_has_the_steps_after_the_last_window(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text(LOG)
    assert read_history(tmp_path, 15).redone == 5
    counter = StepCounter(tmp_path, 20)
    for _ in range(3):
        counter.count()
    counter.close()
    assert read_history(tmp_path, 15).redone == 8
    assert read_history(tmp_path, 40).redone == 0


@pytest.mark.parametrize("content", [None, b"", b"123", bytes(9)])
def test_a_damaged_count_is_not_known(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / STEP_COUNT_FILE).write_bytes(content)
    assert read_step_count(tmp_path) == 0
