"""A file of weights depends on the weights alone, and other tools load it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import nn

from paceline.errors import CheckpointError
from paceline.training.checkpoints.storage import check_weights_file, checked_weights, save_weights
from training.checkpoints.storage.test_folder import file_size_limit


class Tied(nn.Module):
    """Two layers with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.embedding = nn.Linear(3, 4, bias=False), nn.Embedding(4, 3)
        self.out.weight = self.embedding.weight
        self.convolution = nn.Conv2d(3, 2, 2)
        self.norm = nn.BatchNorm2d(2)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def saved(model_state: dict[str, torch.Tensor], file: Path) -> bytes:
    save_weights(model_state, file)
    return file.read_bytes()


def test_the_file_depends_on_the_weights_alone(model: Tied, tmp_path: Path) -> None:
    expected = saved(model.state_dict(), tmp_path / "a.safetensors")
    model_state = model.state_dict()
    assert saved(model_state, tmp_path / "b.safetensors") == expected
    assert saved(dict(reversed(model_state.items())), tmp_path / "c.safetensors") == expected
    assert saved(model.to(memory_format=torch.channels_last).state_dict(), tmp_path / "d.safetensors") == expected
    assert saved(model_state, tmp_path / "a.safetensors") == expected
    assert len(list(tmp_path.iterdir())) == 4
    with torch.no_grad():
        model.convolution.weight[0, 0, 0, 0] += 1
    assert saved(model.state_dict(), tmp_path / "e.safetensors") != expected


def test_tied_weights_are_stored_once_as_safetensors_does(model: Tied, tmp_path: Path) -> None:
    save_weights(model.state_dict(), tmp_path / "ours.safetensors")
    save_model(model, str(tmp_path / "theirs.safetensors"))
    ours, theirs = load_file(tmp_path / "ours.safetensors"), load_file(tmp_path / "theirs.safetensors")
    assert ours.keys() == theirs.keys()
    assert "embedding.weight" in ours
    assert "out.weight" not in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.manual_seed(1)
    other = Tied()
    load_model(other, tmp_path / "ours.safetensors")
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in other.state_dict().items())


def test_the_folder_is_made_and_errors_are_said(model: Tied, tmp_path: Path) -> None:
    file = tmp_path / "new" / "weights.safetensors"
    before = saved(model.state_dict(), file)
    with file_size_limit(100), pytest.raises(CheckpointError, match=r"could not be written to .*: File too large"):
        save_weights(model.state_dict(), file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(CheckpointError, match=r"weights.safetensors is not a folder"):
        save_weights(model.state_dict(), file / "inside.safetensors")


def test_a_file_is_checked_before_there_are_weights(model: Tied, tmp_path: Path) -> None:
    file = tmp_path / "new" / "weights.safetensors"
    check_weights_file(file)
    assert list(file.parent.iterdir()) == []
    before = saved(model.state_dict(), file)
    check_weights_file(file)
    assert file.read_bytes() == before
    for wrong, found in (
        (file / "inside.safetensors", f"{file} is not a folder"),
        (file.parent, "it is a folder"),
        (tmp_path / f"{'long' * 63}.safetensors", "File name too long"),
    ):
        with pytest.raises(CheckpointError) as caught:
            check_weights_file(wrong)
        assert caught.value.message == f"the weights cannot be written to {wrong}: {found}."
        assert caught.value.hint
    with pytest.raises(CheckpointError, match="cannot be written to /proc/"):  # Root cannot write there either.
        check_weights_file(Path("/proc/weights.safetensors"))
    assert list(file.parent.iterdir()) == [file]


def test_entries_that_are_not_tensors_are_refused() -> None:
    with pytest.raises(CheckpointError, match="_extra_state of the model's state_dict is a dict, not a tensor"):
        checked_weights({"weight": torch.ones(2), "_extra_state": {}})
    with pytest.raises(CheckpointError, match="weight is a sparse tensor"):
        checked_weights({"weight": torch.eye(2).to_sparse()})
