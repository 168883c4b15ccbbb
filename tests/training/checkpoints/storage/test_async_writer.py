"""Checkpoints that a thread writes: the state at the time of the call, from buffers that are kept; errors are said."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.storage import AsyncWriter, CheckpointFolder, load
from paceline.training.checkpoints.storage.async_writer import WRITER_NICENESS
from paceline.training.checkpoints.storage.contents import EncodedCheckpoint
from training.checkpoints.storage.states import GROUPS, assert_same, assert_same_state, info, state


class PausedFolder(CheckpointFolder):
    """Writes when it is allowed to; notes the priority of the writing thread and the memory that it writes from."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, keep=10)
        self.may_write = threading.Event()
        self.priorities: list[int] = []
        self.memory: list[set[int]] = []

    def write_encoded(self, encoded: EncodedCheckpoint, *, is_best: bool = False) -> Path:
        assert self.may_write.wait(60)
        self.priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.memory.append({tensor.data_ptr() for named in encoded.tensors.values() for tensor in named.values()})
        return super().write_encoded(encoded, is_best=is_best)


def test_the_state_at_the_time_of_the_call_is_written(tmp_path: Path) -> None:
    folder = PausedFolder(tmp_path)
    writer = AsyncWriter(folder)
    trained, loop, groups = state(5.0), {"best": [1.0]}, [{"lr": 0.1}]
    writer.write(trained, groups, info(5, loop=loop), is_best=True)
    trained.model["bias"].zero_()
    trained.optimizer["bias"]["history"][0].zero_()
    loop["best"][0] = groups[0]["lr"] = 2.0
    assert folder.steps() == []
    folder.may_write.set()
    writer.wait()
    loaded = load(tmp_path)
    assert_same_state(loaded.state, state(5.0))
    assert_same([loaded.param_groups, loaded.info.loop], [[{"lr": 0.1}], {"best": [1.0]}])
    assert folder.best() == 5
    writer.close()


def test_buffers_are_used_again_and_the_thread_is_nice(tmp_path: Path) -> None:
    folder = PausedFolder(tmp_path)
    folder.may_write.set()
    writer = AsyncWriter(folder)
    for step in (1, 2):
        writer.write(state(float(step)), GROUPS, info(step))
        writer.wait()
    assert folder.memory[0] == folder.memory[1]
    assert folder.priorities == [WRITER_NICENESS] * 2
    changed = State({"bias": torch.ones(5), "other": torch.ones(2, 3).T}, {})
    writer.write(changed, [], info(3))
    writer.wait()
    assert_same_state(load(tmp_path).state, changed)
    writer.close()
    assert [load(tmp_path / f"step-0000000{step}").state.model["bias"][0] for step in (1, 2)] == [1, 2]


def test_a_write_waits_for_the_one_before(tmp_path: Path) -> None:
    folder = PausedFolder(tmp_path)
    writer = AsyncWriter(folder)
    writer.write(state(1.0), GROUPS, info(1))
    second = threading.Thread(target=writer.write, args=(state(2.0), GROUPS, info(2)))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    folder.may_write.set()
    second.join()
    writer.wait()
    assert folder.steps() == [1, 2]
    assert_same_state(load(tmp_path / "step-00000001").state, state(1.0))
    writer.close()


def test_an_error_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = AsyncWriter(CheckpointFolder(tmp_path / "file"))
    assert writer.failed() is None
    writer.write(state(), GROUPS, info(1))
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 could not be written"):
        writer.wait()
    assert writer.failed() is None
    writer.write(state(), GROUPS, info(2))
    writer.close()
    error = writer.failed()
    assert error is not None
    assert "step 2" in error.message
    writer.wait()


def test_wait_raises_the_error_of_the_last_write_only(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    writer = AsyncWriter(CheckpointFolder(tmp_path / "checkpoints"))
    writer.write(state(), GROUPS, info(1))
    writer.close()
    (tmp_path / "checkpoints").unlink()
    writer.write(state(), GROUPS, info(2))
    writer.wait()
    error = writer.failed()
    assert error is not None
    assert "step 1" in error.message


def test_an_unexpected_error_does_not_end_in_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    monkeypatch.setattr(folder, "write_encoded", lambda *_, **__: 1 // 0)
    writer = AsyncWriter(folder)
    writer.write(state(), GROUPS, info(4))
    with pytest.raises(CheckpointError, match="step 4 could not be written: ZeroDivisionError") as caught:
        writer.wait()
    assert "Traceback" in (caught.value.detail or "")


def test_a_state_that_cannot_be_kept_is_refused_at_once(tmp_path: Path) -> None:
    writer = AsyncWriter(CheckpointFolder(tmp_path))
    with pytest.raises(CheckpointError, match="weight is a sparse tensor"):
        writer.write(State({"weight": torch.eye(2).to_sparse()}, {}), [], info(1))
    writer.wait()
    assert list(tmp_path.iterdir()) == []
    writer.close()


@pytest.mark.gpu
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    writer = AsyncWriter(CheckpointFolder(tmp_path))
    for step in (1, 2):
        kept = State(
            {"weight": torch.full((1 << 20,), float(step), device="cuda"), "half": torch.ones(3).cuda().half()}, {}
        )
        writer.write(kept, [], info(step))
        kept.model["weight"].zero_()
        writer.wait()
        assert torch.equal(load(tmp_path).state.model["weight"], torch.full((1 << 20,), float(step)))
    assert all(buffer.is_pinned() for named in writer._buffers.values() for buffer in named.values())
    writer.close()
