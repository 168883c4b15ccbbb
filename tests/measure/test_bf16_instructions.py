"""Tests of the features that the system lists for a processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.measure import bf16_instructions
from paceline.measure.bf16_instructions import has_bf16_instructions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx512f avx512_vnni\nvmx flags\t: avx512_bf16\n", False),
        ("model name\t: bf16 avx512_bf16\nflags\t\t: fpu\n", False),
        ("", False),
    ],
)
def test_instructions_are_listed(text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(bf16_instructions, "CPU_INFO", file)
    assert has_bf16_instructions() is expected


def test_a_system_that_lists_nothing_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_instructions, "CPU_INFO", tmp_path / "missing")
    assert not has_bf16_instructions()
