"""Imports go one way, and what must be free of torch is; read from the sources, so that none hides in a function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "paceline"

LAYERS = [
    {"cli"},
    {"report", "experiments"},
    {"launch"},
    {"doctor"},
    {"training"},
    {"strategies", "workloads"},
    {"comm"},
    {"measure"},
    {"predict"},
    {"analysis"},
    {"plans"},
    {"records", "config", "user_code", "errors"},
]
"""From the user down to the ground: a part may import those below it, and itself."""

FREE_OF_TORCH = {
    "cli",
    "report",
    "predict",
    "analysis",
    "plans",
    "records",
    "config",
    "user_code",
    "errors",
}
BELOW_REPORT = {
    "predict",
    "analysis",
    "plans",
    "records",
    "config",
    "user_code",
    "errors",
}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(file: Path) -> list[str]:
    """Every module that a file imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            found += [f"{node.module}.{name.name}" for name in node.names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = [(file, file.relative_to(PACKAGE).parts[0].removesuffix(".py")) for file in FILES]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


@pytest.mark.parametrize(("file", "part"), [p for p in PARTS if p[1] not in ("__init__", "__main__")], ids=str)
def test_imports_go_down_only(file: Path, part: str) -> None:
    assert part in LEVEL, f"{part} has no place among the layers"
    for module in imports(file):
        if not module.startswith("paceline."):
            continue
        other = part_of(module)
        assert other == part or LEVEL[other] > LEVEL[part] or _ground(part, other), f"{file} imports {module}"
        assert part != "report" or other in BELOW_REPORT | {"report"}, f"{file}: the report reads records, not {module}"


def _ground(part: str, other: str) -> bool:
    """The lowest layer's parts may use each other, in the order in which they are named."""
    order = ["records", "config", "user_code", "errors"]
    return part in order and other in order and order.index(part) < order.index(other)


@pytest.mark.parametrize(("file", "part"), [p for p in PARTS if p[1] in FREE_OF_TORCH], ids=str)
def test_free_of_torch(file: Path, part: str) -> None:
    assert not [module for module in imports(file) if module.split(".")[0] == "torch"], part


def test_no_part_is_forgotten() -> None:
    assert {part for _, part in PARTS} - {"__init__", "__main__"} <= LEVEL.keys()
