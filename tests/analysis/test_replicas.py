"""Sentences on replicas that differ."""

from __future__ import annotations

from msgspec.structs import replace

from paceline.analysis.replicas import difference_sentence
from run_models import replicas


def test_a_difference_by_rounding_is_explained() -> None:
    difference = replicas().difference
    assert difference is not None
    assert difference_sentence(difference) == (
        "replicas differ by rounding, found after step 8: fc.weight and 2 other tensors, by up to 3.1e-8 of the norm "
        "(rank 1); other processors or another order of summation explain it"
    )


def test_a_larger_difference_says_since_when() -> None:
    difference = replicas().difference
    assert difference is not None
    large = replace(difference, by_rounding=False, distance=0.059, tensors=1, ranks=[0, 1])
    assert difference_sentence(large) == (
        "replicas differ after step 8: fc.weight, by up to 0.06 of the norm (ranks 0 and 1); they were equal after "
        "step 4"
    )
    unknown = replace(large, last_equal_step=None, distance=None)
    assert difference_sentence(unknown) == (
        "replicas differ after step 8: fc.weight, by up to a value that is not finite (ranks 0 and 1); no earlier "
        "check found them equal"
    )
    between = replace(large, last_equal_step=8)
    assert difference_sentence(between).endswith(
        "; they were equal at the end of that step, so the weights were changed after it"
    )
