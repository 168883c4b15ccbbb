"""Tensors as files have them: contiguous, each with its own memory; layouts are described and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.training.checkpoints.storage.tensors import KEPT_DTYPES, dense_strides, is_dense, on_disk, with_strides

CHANNELS_LAST = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
STRIDES: list[tuple[Tensor, list[int] | None]] = [
    (torch.ones(2, 3), None),
    (torch.ones(2, 3).T, [1, 3]),
    (CHANNELS_LAST, [24, 1, 8, 2]),
    (torch.ones(5, 3, 1, 1).to(memory_format=torch.channels_last), [3, 1, 3, 3]),
    (torch.ones(4, 4)[:, :2], None),
    (torch.ones(4, 1).expand(4, 3), None),
    (torch.ones(()), None),
    (torch.ones(0, 3).T, None),
]


@pytest.mark.parametrize(("tensor", "strides"), STRIDES)
def test_strides_of_dense_tensors_come_back(tensor: Tensor, strides: list[int] | None) -> None:
    assert dense_strides(tensor) == strides
    if strides is not None:
        copy = with_strides(tensor.contiguous(), strides)
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)


def test_strides_with_gaps_or_overlaps_are_not_dense() -> None:
    assert is_dense([2, 3], [3, 1])
    assert not is_dense([2, 3], [4, 1])
    assert not is_dense([2, 3], [1, 1])
    assert not is_dense([2, 3], [3])


def test_files_have_each_tensor_in_its_own_memory() -> None:
    whole = torch.arange(6.0)
    kept = on_disk({"whole": whole, "part": whole[2:4], "shaped": whole.view(2, 3), "transposed": whole.view(2, 3).T})
    assert kept["whole"].data_ptr() == whole.data_ptr(), "what is contiguous already is not copied"
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept.values()}) == 4
    assert all(tensor.is_contiguous() for tensor in kept.values())
    assert kept["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_files_have_the_values_of_conjugate_and_negative_views() -> None:
    number = torch.tensor([1 + 2j], dtype=torch.complex64)
    kept = on_disk({"conjugate": number.conj(), "negative": number.conj().imag})
    assert kept["conjugate"].tolist() == [1 - 2j]
    assert kept["negative"].tolist() == [-2]
    assert not kept["conjugate"].is_conj()
    assert not kept["negative"].is_neg()


@pytest.mark.parametrize("dtype", sorted(KEPT_DTYPES, key=str), ids=str)
def test_safetensors_keeps_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([0, 1, 1], dtype=torch.uint8).to(dtype)
    save_file({"a": tensor}, tmp_path / "file")
    found = load_file(tmp_path / "file")["a"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
