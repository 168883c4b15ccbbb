"""Nested values become JSON and tensors, and come back with the same types, values and layouts."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.training.checkpoints.storage.encoding import ValueDecoder, ValueEncoder
from paceline.training.checkpoints.storage.tensors import KEPT_DTYPES, on_disk
from training.checkpoints.storage.states import assert_same

Point = namedtuple("Point", "x y")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of every dtype that is kept, of any bits, in many layouts."""
    dtype = draw(st.sampled_from(sorted(KEPT_DTYPES, key=str)))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    size = [shape[one] for one in order]
    count = int(np.prod(size)) * dtype.itemsize
    if dtype is torch.bool:
        flat = torch.randint(2, (count,), generator=generator).bool()
    else:
        flat = torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(dtype)
    tensor = flat.view(size).permute([order.index(one) for one in range(len(order))])
    assert list(tensor.shape) == shape
    return draw(st.sampled_from(VIEWS))(tensor)


def conjugated(tensor: Tensor) -> Tensor:
    return tensor.conj() if tensor.is_complex() else tensor


def negated(tensor: Tensor) -> Tensor:
    return tensor.conj().imag if tensor.dtype == torch.complex64 else tensor


VIEWS = [
    lambda tensor: tensor,
    lambda tensor: tensor[..., 1:] if tensor.dim() else tensor,
    lambda tensor: tensor.expand(2, *tensor.shape),
    conjugated,
    negated,
]

texts = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["$tensor", "$", "", "__metadata__", "a/b"])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True, allow_infinity=True) | texts
keys = texts | st.integers() | st.tuples(st.integers(), texts)
values = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    """Encode a value, carry it through JSON, and decode it with the tensors as a file has them."""
    encoder = ValueEncoder()
    text = msgspec.json.encode(encoder.encode(value, ("value",), "the value"))
    return ValueDecoder(on_disk(encoder.tensors)).decode(msgspec.json.decode(text))


@settings(max_examples=150, deadline=None)
@given(values)
def test_values_come_back(value: Any) -> None:
    assert_same(there_and_back(value), value)


def test_numbers_of_numpy_come_back_as_numbers_of_python() -> None:
    assert_same(there_and_back([np.float64(0.1), np.int32(3), np.bool_(True), np.float32(0.5)]), [0.1, 3, True, 0.5])


def test_other_kinds_of_dicts_and_sizes_come_back_as_plain_ones() -> None:
    assert_same(there_and_back(OrderedDict(b=1, a=torch.Size([2]))), {"b": 1, "a": (2,)})


def test_a_shared_tensor_is_stored_once_and_stays_shared() -> None:
    shared = torch.ones(3)
    encoder = ValueEncoder()
    encoded = encoder.encode({"a": {"step": shared}, "b": {"step": shared.view(3)}, "c": shared.clone()}, ("x",), "x")
    assert list(encoder.tensors) == ["x/a/step", "x/c"]
    found = ValueDecoder(encoder.tensors).decode(encoded)
    assert found["a"]["step"] is found["b"]["step"]
    assert found["c"] is not found["a"]["step"]


def test_tensors_without_elements_are_not_shared() -> None:
    found = there_and_back([torch.zeros(0, 2), torch.zeros(0, 2)])
    assert found[0] is not found[1]


def test_names_with_slashes_do_not_collide() -> None:
    value = {"a/b": {"c": torch.tensor(1)}, "a": {"b/c": torch.tensor(2)}}
    assert_same(there_and_back(value), value)


class Subclass(Tensor):
    """A tensor that is more than its data."""


LOOP: list[Any] = []
LOOP.append(LOOP)
UNKEPT = [
    (torch.eye(2).to_sparse(), "is a sparse tensor"),
    (torch.eye(2).to_sparse_csr, "is a sparse tensor"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is a quantised tensor"),
    (torch.ones(2, dtype=torch.complex128), "is a tensor of complex128"),
    (torch.ones(2, device="meta"), "is a tensor without data (on the device meta)"),
    (torch.ones(2).as_subclass(Subclass), "is a tensor of class Subclass"),
    (object(), "is an object"),
    (lambda: lambda: None, "is a function"),
    (Point(1, 2), "is a Point"),
    ({1, 2}, "is a set"),
    (np.ones(2), "is a ndarray"),
    (b"bytes", "is a bytes"),
    (1j, "is a complex"),
    ("\ud800", "contains text that is not valid Unicode"),
    ({"\ud800": 1}, "contains text that is not valid Unicode"),
    (torch.float32, "is a dtype"),
]


@pytest.mark.parametrize(("value", "found"), UNKEPT, ids=[found for _, found in UNKEPT])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*quantize", "ignore::DeprecationWarning")
def test_what_cannot_be_kept_is_named(value: Any, found: str) -> None:
    made = value() if callable(value) and not isinstance(value, type) else value
    with pytest.raises(CheckpointError) as caught:
        ValueEncoder().encode({"buffers": [1, made]}, ("weight",), "the state of the optimiser")
    message = f"the state of the optimiser cannot be kept in a checkpoint: weight/buffers/1 {found}."
    assert caught.value.message == message
    assert caught.value.hint is not None


def test_a_value_that_contains_itself_is_refused() -> None:
    with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
        ValueEncoder().encode(LOOP, ("extra",), "the value given as extra")


MALFORMED = [
    {"$tensor": "b"},
    {"$tensor": 3},
    {"$tensor": ["a"]},
    {"$tensor": "a", "$strides": [1]},
    {"$tensor": "a", "$strides": [0, 0]},
    {"$tensor": "a", "$strides": [1, 1 << 40]},
    {"$tensor": "a", "$strides": [-3, 1]},
    {"$tensor": "a", "$strides": [True, 2]},
    {"$tensor": "a", "$strides": "12"},
    {"$tuple": 3},
    {"$float": "0x"},
    {"$float": ["nan"]},
    {"$pairs": {"a": 1}},
    {"$pairs": [[1]]},
    {"$pairs": [[[1], 2]]},
]


@pytest.mark.parametrize("value", MALFORMED, ids=str)
def test_json_that_was_not_encoded_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"it has|it names|strides"):
        ValueDecoder({"a": torch.ones(2, 3)}).decode([value])
