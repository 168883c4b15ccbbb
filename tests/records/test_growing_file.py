"""Records on a disk that is really full: a small file system in memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import paceline
from paceline.errors import RecordError
from paceline.records import read_run
from paceline.records.experiment.record import read_experiment
from paceline.records.growing_file import GrowingFile

pytestmark = pytest.mark.takes(10)

RUN = ("user_workloads:plain", "--batch", "16")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Yield a folder on a disk of this size."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_content_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    line = b"x" * 2999 + b"\n"
    with small_disk(tmp_path / "disk", "16k") as disk:
        file = GrowingFile(disk / "events")
        for _ in range(5):
            file.append(line)
        with pytest.raises(RecordError, match=rf"^the disk of {disk} is full: the record could not be written\."):
            file.append(line)
        file.append(b"end\n")  # For example, after the user has made space.
        file.close()
        assert (disk / "events").read_bytes() == line * 5 + b"end\n"
        other = GrowingFile(disk / "events", continued=True)
        other.append(b"more\n")
        other.close()
        assert (disk / "events").read_bytes().endswith(b"end\nmore\n")


@pytest.mark.parametrize(("size", "steps"), [("8k", 0), ("60k", 1)], ids=["launcher", "rank"])
def test_a_run_on_a_full_disk_ends_with_a_sentence_and_a_readable_record(tmp_path: Path, size: str, steps: int) -> None:
    with small_disk(tmp_path / "disk", size) as disk:
        out = disk / "run"
        done = paceline("train", *RUN, "--steps", "20000", "--out", str(out), expect=8)
        assert (
            f"error: the disk of {out} is full: the record could not be written.\nhint: free some space" in done.stderr
        )
        assert "Traceback" not in done.stderr
        if steps:
            assert {len(rows) >= steps for rows in read_run(out).steps.values()} == {True}


def test_a_comparison_on_a_full_disk_reports_what_was_measured(tmp_path: Path) -> None:
    quick = ("--repeats", "1", "--max-repeats", "1", "--no-doctor", "--no-proof", "--steps", "200")
    with small_disk(tmp_path / "disk", "100k") as disk:
        out = disk / "compared"
        done = paceline("compare", *RUN, "--strategies", "ddp,allreduce", *quick, "--out", str(out), expect=8)
        assert f"error: the disk of {out}/repeat-1 is full: the record could not be written." in done.stderr
        assert "Traceback" not in done.stderr
        assert not read_experiment(out).finished
