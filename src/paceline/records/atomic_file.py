"""Write a file atomically: readers see the complete file or none, also if the process is killed while it writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write the content to; rename it to `path` at the end of the `with` block.

    After an error in the block, `path` is as before, and the unfinished file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):  # An error of the block is the one to raise.
            temporary.unlink(missing_ok=True)
