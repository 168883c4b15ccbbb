"""Differences of complex gradients: both parts of a number count, in the errors and in the exact mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.comm import Comm
from paceline.training.parity.difference import GradientDifference, measure_difference
from paceline.training.parity.proof import compare_gradients
from paceline.training.scripts.script_parity import _exact_mean, _tolerance
from ranks import Pool

RIGHT = torch.tensor([[1.0 + 2.0j, 3.0 - 1.0j]], dtype=torch.complex64)
WRONG = RIGHT + 0.5j


def test_an_imaginary_part_that_is_wrong_is_an_error() -> None:
    found = measure_difference({"a": WRONG}, {"a": RIGHT}, {"a": 4}, 1e-5)
    assert found.error == pytest.approx((2 * 0.25 / 15) ** 0.5)
    assert found.parameter == "a"


def compared(comm: Comm) -> tuple[GradientDifference, GradientDifference, torch.Tensor]:
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(RIGHT))
    right, wrong = ({"a": value} for value in (RIGHT, WRONG))
    equal = compare_gradients(right, right, model, comm, 1e-5)
    differs = compare_gradients(wrong if comm.rank else right, right, model, comm, 1e-5)
    return equal, differs, _exact_mean(RIGHT * (1 + comm.rank), comm)


def test_ranks_compare_both_parts_and_average_both(pool: Pool) -> None:
    for equal, differs, mean in pool.run(compared, 2):
        assert equal == GradientDifference()
        assert differs.error == pytest.approx((2 * 0.25 / 15) ** 0.5)
        assert torch.equal(mean, RIGHT.to(torch.complex128) * 1.5)


def summed(comm: Comm) -> list[float]:
    own = torch.full((2,), 1.0 + comm.rank, dtype=torch.float64)
    return [*_exact_mean(own, comm).tolist(), *own.tolist()]


def test_the_exact_mean_leaves_the_gradient_as_it_is(pool: Pool) -> None:
    assert pool.run(summed, 2) == [[1.5, 1.5, 1.0, 1.0], [1.5, 1.5, 2.0, 2.0]]


def test_complex_parameters_have_the_tolerance_of_their_parts() -> None:
    assert _tolerance([("a", nn.Parameter(RIGHT))]) == 1e-5
