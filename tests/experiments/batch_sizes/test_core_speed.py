"""Speed of a core in a matrix product."""

from __future__ import annotations

import torch

from paceline.experiments.batch_sizes.core_speed import measure_core_flop_per_s


def test_a_core_computes_and_the_number_of_threads_is_kept() -> None:
    before = torch.get_num_threads()
    assert 1e6 < measure_core_flop_per_s("fp32") < 1e14
    assert torch.get_num_threads() == before
