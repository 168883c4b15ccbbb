"""Read from a rank's log and traceback why native code ended it, and in which collective the rank was."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.user_code import is_of_user

STACK_START = "(most recent call first):"
"""End of the first line of a stack that faulthandler prints."""
_TAIL_BYTES = 2**16
_SIZES_DIFFER = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""Part of Gloo's message when it receives more bytes than the operation expects; it then ends the process."""
_CAUSES = (
    r"^\s*what\(\):\s*(.+)$",  # C++: an exception that nobody caught.
    r"^(terminate called .+)$",
    r"^(.+: Assertion .+ failed\.?)$",
    r"^((?:free|malloc|realloc|munmap_chunk)\(\): .+|double free .+|corrupted .+|\*\*\* .+ \*\*\*.*)$",  # libc.
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')


def read_tail(log: Path) -> str:
    """Return the end of a log; empty if there is no log."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def read_stack(log: Path) -> str | None:
    """Return the last stack that faulthandler printed into a rank's log; None if there is none."""
    text = read_tail(log)
    starts = [match.start() for match in re.finditer(rf"^.*{re.escape(STACK_START)}$", text, re.MULTILINE)]
    return text[starts[-1] :].partition("\nExtension modules:")[0].strip() if starts else None


def native_cause(log: Path) -> str | None:
    """Return the message with which native code ended a rank; None if its log has none."""
    text = read_tail(log)
    for cause in _CAUSES:
        if found := re.findall(cause, text, re.MULTILINE):
            return str(found[-1]).strip()
    return None


def size_mismatch(cause: str) -> tuple[int, int] | None:
    """Return the bytes that Gloo received and those that it expected at most, if it ended a rank for that reason."""
    found = _SIZES_DIFFER.search(cause)
    return None if found is None else (int(found[1]), int(found[2]))


def collective_in_stack(stack: str) -> str | None:
    """Return the innermost function of torch.distributed in a stack or traceback; None if there is none."""
    functions = [function for file, _, function in _frames(stack) if file.endswith("distributed_c10d.py")]
    return functions[0].removeprefix("_") if functions else None


def place_in_stack(stack: str) -> str | None:
    """Return the innermost line of the user's code in a stack or traceback, as "file.py:12"; None if there is none."""
    for file, line, _ in _frames(stack):
        if is_of_user(file):
            return f"{Path(file).name}:{line}"
    return None


def _frames(stack: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame, the innermost first: faulthandler's order, not a traceback's."""
    frames = [(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(stack)]
    return frames if STACK_START in stack else frames[::-1]
