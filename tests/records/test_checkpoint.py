"""The description of a checkpoint: bounds are checked, and random states survive JSON."""

from __future__ import annotations

import msgspec
import pytest

from paceline.records.checkpoint import CheckpointInfo, RandomStateInfo
from paceline.records.decoder import ModelError, decode

RANDOM = RandomStateInfo(python=b"\x00\xff", numpy_key=b"\x01", numpy_position=3, torch_cpu=bytes(range(256)))
INFO = CheckpointInfo(
    step=3,
    epoch=1,
    epoch_samples=64,
    samples=128,
    strategy="ddp:bucket_mb=1",
    ranks=2,
    config={"batch": 64},
    random=[RANDOM, RANDOM],
    time=1.5,
    versions={"torch": "2"},
)


def test_a_description_comes_back() -> None:
    assert decode(msgspec.json.encode(INFO), CheckpointInfo, "info") == INFO


def test_bytes_are_text_that_json_can_hold() -> None:
    assert msgspec.json.decode(msgspec.json.encode(RANDOM))["python"] == "AP8="


@pytest.mark.parametrize("key", ["step", "epoch", "epoch_samples", "samples", "ranks"])
def test_counts_have_bounds(key: str) -> None:
    content = msgspec.json.encode(msgspec.structs.replace(INFO, **{key: -1}))
    with pytest.raises(ModelError, match=f"info.{key} is not a whole number, 0 or more"):
        decode(content, CheckpointInfo, "info")
