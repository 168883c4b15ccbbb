"""A folder of checkpoints: round trips, what is kept, which one is the newest, and writing that fails or is killed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.storage import CheckpointFolder, load
from paceline.training.checkpoints.storage.folder import REWRITTEN
from training.checkpoints.storage.states import GROUPS, assert_same, assert_same_state, info, state


def write(folder: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        folder.write(state(float(step)), GROUPS, info(step))


def newest_step(folder: CheckpointFolder) -> tuple[int | None, list[str]]:
    """Return the step of the newest valid checkpoint, whose numbers must be those of the step, and the warnings."""
    loaded, warnings = folder.newest()
    if loaded is not None:
        assert_same_state(loaded.state, state(float(loaded.info.step)))
    return loaded.info.step if loaded else None, warnings


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def damage(path: Path, file: str = "model.safetensors") -> None:
    """Flip a bit in the last byte of the tensors, or in the middle of a JSON file."""
    content = bytearray((path / file).read_bytes())
    content[-1 if file.endswith("safetensors") else len(content) // 2] ^= 1
    (path / file).write_bytes(content)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    about = info(1200, loop={"best": float("inf"), "rates": (0.1,)}, extra={"ema": torch.ones(2, dtype=torch.bfloat16)})
    path = CheckpointFolder(tmp_path / "new" / "checkpoints").write(state(), GROUPS, about)
    assert path == tmp_path / "new" / "checkpoints" / "step-00001200"
    loaded = load(path)
    assert_same_state(loaded.state, state())
    assert loaded.state.model["tied.weight"] is loaded.state.model["conv.weight"]
    assert_same(loaded.param_groups, GROUPS)
    assert_same([loaded.info.loop, loaded.info.extra], [about.loop, about.extra])
    assert (loaded.info.step, loaded.info.config, loaded.path) == (1200, {"batch": 64}, path)


def test_a_state_without_tensors_has_no_files_of_them(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).write(State({}, {}), [], info(1))
    assert names(path) == ["checkpoint.json"]
    assert_same_state(load(path).state, State({}, {}))


def test_parameters_that_are_parts_of_one_buffer_are_kept(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    model = {"a": flat[:2], "b": flat[2:].view(2, 2), "whole": flat}
    path = CheckpointFolder(tmp_path).write(State(model, {}), [], info(1))
    assert_same(load(path).state.model, model)


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in range(1, 7):
        folder.write(state(float(step)), GROUPS, info(step), is_best=step == 2)
    assert folder.steps() == [2, 5, 6]
    assert folder.best() == 2
    folder.mark_best(5)
    write(folder, 7, 8)
    assert folder.steps() == [5, 7, 8]
    assert newest_step(folder) == (8, [])


def test_only_an_existing_one_can_be_the_best(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3"):
        CheckpointFolder(tmp_path).mark_best(3)


def test_a_damaged_note_of_the_best_is_as_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(state(), GROUPS, info(1), is_best=True)
    (tmp_path / "best.json").write_text('{"step":')
    assert folder.best() is None
    write(folder, 2)
    assert folder.steps() == [1, 2]


def test_the_newest_is_the_one_written_last(tmp_path: Path) -> None:
    """A run that was resumed from an older checkpoint continues from there, not from the steps it gave up."""
    folder = CheckpointFolder(tmp_path, keep=3)
    write(folder, 6, 8, 7)
    assert newest_step(folder) == (7, [])
    write(CheckpointFolder(tmp_path, keep=2), 9)
    assert folder.steps() == [7, 9]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(state(99.0), GROUPS, info(5), is_best=True)
    write(folder, 5)
    assert newest_step(folder) == (5, [])
    assert names(tmp_path) == ["step-00000005"]
    assert folder.best() is None, "the best was the one that is gone"


@pytest.mark.parametrize("both", [True, False])
def test_a_replacement_that_was_cut_off_is_completed(tmp_path: Path, both: bool) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(state(99.0), GROUPS, info(5))
    (tmp_path / "step-00000005").rename(tmp_path / "kept")
    write(folder, 4, 5)
    (tmp_path / "step-00000005").rename(tmp_path / f"step-00000005{REWRITTEN}")
    if both:
        (tmp_path / "kept").rename(tmp_path / "step-00000005")
    else:
        shutil.rmtree(tmp_path / "kept")
    assert newest_step(folder) == (5, [])
    write(folder, 6)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    assert load(tmp_path / "step-00000005").state.model["bias"][0] == 5


@pytest.mark.parametrize("file", ["checkpoint.json", "model.safetensors", "optimizer.safetensors", "other.safetensors"])
def test_a_damaged_one_is_passed_over_with_the_reason(tmp_path: Path, file: str) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    write(folder, 1, 2, 3)
    damage(tmp_path / "step-00000003", file)
    step, (warning,) = newest_step(folder)
    assert step == 2
    assert warning.startswith(f"{tmp_path / 'step-00000003'} is not usable: ")
    assert file in warning
    damage(tmp_path / "step-00000001", file)
    assert newest_step(folder)[1] == [warning], "older ones are of no interest"
    damage(tmp_path / "step-00000002", file)
    assert newest_step(folder)[0] is None
    assert len(newest_step(folder)[1]) == 3


@pytest.mark.parametrize("kind", ["file", "link", "empty folder"])
def test_something_else_under_the_name_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 1)
    place = tmp_path / "step-00000002"
    {"file": place.touch, "link": lambda: place.symlink_to("nowhere"), "empty folder": place.mkdir}[kind]()
    step, (warning,) = newest_step(folder)
    assert step == 1
    assert str(place) in warning
    write(folder, 2)
    assert newest_step(folder) == (2, [])
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_damaged_ones_are_removed_before_valid_ones(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, 1, 2)
    (tmp_path / "step-00000002" / "model.safetensors").unlink()
    write(folder, 3)
    assert folder.steps() == [1, 3]


def test_leftovers_of_a_killed_writer(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".writing-step-00000002")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".removing-step-00000000")
    assert newest_step(folder) == (
        1,
        [f"the checkpoint of step 2 in {tmp_path} is incomplete: its writer was stopped."],
    )
    write(folder, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert CheckpointFolder(path).newest() == (None, [])
        assert CheckpointFolder(path).steps() == []


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Let no file grow beyond a limit, as on a full disk. Python ignores the signal, so writing raises an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_failure(folder: CheckpointFolder, reason: str, hint: str) -> None:
    """Fail to write step 2, and check that step 1 is intact and nothing is left of step 2."""
    large = State({"weight": torch.zeros(1 << 20)}, {})
    with pytest.raises(CheckpointError) as caught:
        folder.write(large, [], info(2))
    assert caught.value.message == (
        f"the checkpoint of step 2 could not be written to {folder.path}: {reason}; older checkpoints are intact."
    )
    assert hint in (caught.value.hint or "")
    assert names(folder.path) == ["step-00000001"]
    assert newest_step(folder) == (1, [])


@pytest.mark.parametrize("limit", [200, 2000, 100_000])
def test_a_limit_on_the_size_of_files(tmp_path: Path, limit: int) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 1)
    with file_size_limit(limit):
        check_failure(folder, "File too large", "ulimit -f")
    write(folder, 3)
    assert newest_step(folder) == (3, [])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = CheckpointFolder(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"could not be written to .*: Not a directory"):
        write(folder, 1)
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        folder.newest()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk / "checkpoints")
    write(folder, 1)
    check_failure(folder, "No space left on device", "free space")
    write(folder, 3)
    assert newest_step(folder) == (3, [])


def test_a_disk_that_has_become_read_only(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk / "checkpoints")
    write(folder, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    check_failure(folder, "Read-only file system", "make the folder writable")


KILLED_WRITERS = """
import json, os, random, signal, sys, time
from pathlib import Path
from paceline.training.checkpoints.storage import CheckpointFolder
from training.checkpoints.storage.states import GROUPS, assert_same_state, info, state

draw, found, step = random.Random(0), [], 0
folder = CheckpointFolder(Path(sys.argv[1]), keep=1)
for _ in range(int(sys.argv[2])):
    written, note = os.pipe()
    writer = os.fork()
    if not writer:
        for later in range(step + 1, 1000):
            folder.write(state(float(later)), GROUPS, info(later), is_best=later % 5 == 0)
            folder.write(state(float(later)), GROUPS, info(later))
            os.write(note, b"1")
        os._exit(0)
    os.read(written, 1)
    time.sleep(draw.uniform(0, 0.03))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    loaded, warnings = folder.newest()
    step = loaded.info.step if loaded else 0
    if loaded:
        assert_same_state(loaded.state, state(float(step)))
    found.append([step, warnings])
folder.write(state(float(step)), GROUPS, info(step))
print(json.dumps([found, sorted(entry.name for entry in Path(sys.argv[1]).iterdir()), folder.best()]))
"""


def test_writers_that_are_killed_leave_a_valid_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED_WRITERS, str(tmp_path), "15"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found, left, best = json.loads(done.stdout)
    steps = [step for step, _ in found]
    assert steps == sorted(set(steps)), "no checkpoint is lost"
    assert all("its writer was stopped" in warning for _, warnings in found for warning in warnings)
    expected = {f"step-{steps[-1]:08d}"} | ({"best.json", f"step-{best:08d}"} if best else set())
    assert set(left) == expected


def test_a_writer_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 1)
    interrupt: Callable[..., None] = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    monkeypatch.setattr("paceline.training.checkpoints.storage.folder.write_content", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(folder, 2)
    assert names(tmp_path) == ["step-00000001"]
