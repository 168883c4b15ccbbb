"""Tests of the examples. Their folder is added to `sys.path`, so that `import gpt` works here and on pool ranks."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 60

if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
