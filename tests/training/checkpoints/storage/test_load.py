"""A checkpoint is loaded from the path of one, of a folder of them, or of a run, or an error says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.training.checkpoints.storage import CheckpointFolder, load, read_info
from training.checkpoints.storage.states import GROUPS, info, state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    for step in (1, 2):
        folder.write(state(), GROUPS, info(step))
    return tmp_path / "run"


def test_a_run_a_folder_of_checkpoints_and_one_of_them(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000002"
    for path in (run, run / "checkpoints", newest):
        assert (load(path).info.step, load(path).path, load(path).warnings) == (2, newest, ())
    assert load(run / "checkpoints" / "step-00000001").info.step == 1


def test_a_copy_of_a_checkpoint_under_another_name(run: Path) -> None:
    copy = (run / "checkpoints" / "step-00000001").rename(run / "best model")
    assert load(copy).info.step == 1
    link = run / "link"
    link.symlink_to(copy)
    assert load(link).info.step == 1


def test_a_damaged_one_is_passed_over_in_a_folder_and_refused_by_name(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000002"
    (newest / "model.safetensors").unlink()
    loaded = load(run)
    assert (loaded.info.step, loaded.warnings) == (1, (f"{newest} is not usable: model.safetensors is missing.",))
    with pytest.raises(CheckpointError) as caught:
        load(newest)
    assert caught.value.message == f"{newest} cannot be loaded: model.safetensors is missing."
    assert caught.value.hint == f"name the folder {newest.parent} instead, for the newest checkpoint that is intact"


def test_the_description_is_read_without_tensors(run: Path) -> None:
    folder = CheckpointFolder(run / "checkpoints", keep=9)
    folder.write(state(), GROUPS, info(1, loop={"world_size": 3}))  # Again, so it is the newest.
    for file in run.rglob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    for path in (run, run / "checkpoints", run / "checkpoints" / "step-00000001"):
        assert read_info(path) == info(1, loop={"world_size": 3})
    with pytest.raises(CheckpointError, match=r"the checksum of model\.safetensors differs"):
        load(run)


@pytest.mark.parametrize("damage", ["optimizer.safetensors", "checkpoint.json"])
def test_a_description_of_a_damaged_checkpoint_is_refused(run: Path, damage: str) -> None:
    newest = run / "checkpoints" / "step-00000002"
    content = (newest / damage).read_bytes()
    (newest / damage).write_bytes(content[:-9] if damage != "checkpoint.json" else content.replace(b":64", b":65"))
    assert read_info(run).step == 1
    with pytest.raises(CheckpointError, match=r"bytes instead of|the checksum of checkpoint\.json differs"):
        read_info(newest)


def test_another_format_names_the_version(run: Path) -> None:
    file = run / "checkpoints" / "step-00000002" / "checkpoint.json"
    file.write_bytes(file.read_bytes().replace(b'"format":1', b'"format":7'))
    with pytest.raises(CheckpointError, match="it has format 7") as caught:
        load(file.parent)
    assert caught.value.hint == "load it with the version of Paceline that wrote it"


def test_all_reasons_are_said_if_none_is_valid(run: Path) -> None:
    for name in ("step-00000001", "step-00000002"):
        (run / "checkpoints" / name / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load(run)
    assert caught.value.message == (
        f"{run / 'checkpoints'} has no checkpoint that can be loaded. "
        f"{run / 'checkpoints' / 'step-00000002'} is not usable: checkpoint.json is missing. "
        f"{run / 'checkpoints' / 'step-00000001'} is not usable: checkpoint.json is missing."
    )


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, found in (("file", "is not a folder"), ("missing", "does not exist"), ("empty", "has no checkpoint")):
        with pytest.raises(CheckpointError, match=found) as caught:
            load(tmp_path / name)
        assert caught.value.hint == "name a run's folder, its folder of checkpoints, or one checkpoint"
