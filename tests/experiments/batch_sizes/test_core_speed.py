"""Speed of a core in a matrix product."""

from __future__ import annotations

import subprocess
import sys
from itertools import repeat

import torch

from paceline.experiments.batch_sizes.core_speed import measure_core_speed
from paceline.measure.cores import affine_cores


def test_a_core_computes_and_the_number_of_threads_is_kept() -> None:
    before = torch.get_num_threads()
    assert 1e6 < measure_core_speed("fp32").flop_per_s < 1e14
    assert torch.get_num_threads() == before


def test_the_load_of_other_programs_is_measured_with_it() -> None:
    busy = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for command in repeat(busy, affine_cores())]
    try:
        load = measure_core_speed("fp32").other_load
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert load is not None
    # As many programs as cores have about half of them; other load of the machine only adds to that.
    assert load > 0.2 * affine_cores()
