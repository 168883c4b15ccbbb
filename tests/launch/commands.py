"""Runs `paceline` as a user does: in processes of its own, where the users' modules are."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT_S = 90


def paceline(*arguments: str, expect: int = 0, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    done = subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def start(*arguments: str) -> subprocess.Popen[str]:
    """Starts a command as a shell would: in a process group of its own."""
    return subprocess.Popen(
        command(*arguments),
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def command(*arguments: str) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "paceline", *arguments]


def wait_until(holds: Callable[[], Any], what: str) -> None:
    """Waits for something that a process of ours will do."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.05)
