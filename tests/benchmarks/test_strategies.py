"""Tests of benchmarks/strategies.py: it measures only missing rounds, and writes its page without torch."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import pytest

from commands import paceline

pytestmark = pytest.mark.takes(4)

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
PAGE = """# Results

Text before.

<!-- made by benchmarks/strategies.py: begin -->
old figures
<!-- made by benchmarks/strategies.py: end -->

Text after.
"""


def benchmark(*arguments: str, out: Path) -> str:
    """Run the benchmark in this process, with commands that are forked; return its output."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["strategies.py", *arguments, "--out", str(out)])
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setattr(subprocess, "run", lambda command, **_: paceline(*command[3:]))
        runpy.run_path(str(BENCHMARKS / "strategies.py"), run_name="__main__")
    return printed.getvalue()


def write_without_torch(page: Path, out: Path) -> None:
    words = ["strategies.py", "--write", str(page), "--out", str(out)]
    code = "import runpy, sys; sys.modules['torch'] = None; "
    code += f"sys.argv = {words!r}; sys.path.insert(0, {str(BENCHMARKS)!r}); "
    code += f"runpy.run_path({str(BENCHMARKS / 'strategies.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "out"
    tiny = ("--only", "one-host-2-cnn", "--strategies", "none,ddp", "--quick")
    output = benchmark(*tiny, "--rounds", "1", out=out)
    assert output.count("paceline compare") == 1
    assert "n = 1" in output
    output = benchmark(*tiny, "--rounds", "2", out=out)
    assert output.count("paceline compare") == 1  # The first round is not measured again.
    assert "n = 2" in output
    assert "--strategies ddp,none" in output  # The order rotates from round to round.
    return out


def test_it_lists_the_rounds_measured(measured: Path) -> None:
    lines = benchmark("--list", out=measured).splitlines()
    assert "2 of 7 rounds" in lines[0]
    assert all(" 0 of " in line for line in lines[1:])


def test_the_page_is_written_from_the_records_without_torch(measured: Path, tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(PAGE)
    write_without_torch(page, measured)
    text = page.read_text()
    assert "Text before." in text
    assert text.endswith("Text after.\n")
    assert "old figures" not in text
    assert "| `ddp` | 1.00 |" in text
    assert "n = 2" in text
    assert "### cnn, 2 ranks on one host" in text
    drawing = ElementTree.fromstring((tmp_path / "results.svg").read_text())
    words = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ddp", "none", "cnn, 2 ranks on one host"} <= set(words)
    benchmark("--write", str(page), out=measured)
    assert page.read_text() == text
