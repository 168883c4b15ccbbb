"""Tests of the layers: imports go down only, and some layers import no torch; imports in functions count too."""

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
    {"analysis"},
    {"plans"},
    {"records", "config", "user_code", "errors", "formatting", "signing"},
]
"""Layers from top to bottom: a package may import itself and packages of lower layers."""

FREE_OF_TORCH = {
    "cli",
    "report",
    "analysis",
    "plans",
    "records",
    "config",
    "user_code",
    "errors",
    "formatting",
    "signing",
}
BELOW_REPORT = FREE_OF_TORCH - {"cli", "report"}
REGISTRY = "paceline.strategies.registry"
"""Names of strategies, which the report may know too: it imports no strategy and no torch."""


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(file: Path) -> list[str]:
    """Return all modules that a file imports, at its top or inside a function."""
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
    assert part in LEVEL, f"{part} is not in LAYERS"
    for module in imports(file):
        if not module.startswith("paceline."):
            continue
        other = part_of(module)
        assert other == part or LEVEL[other] > LEVEL[part] or _ground(part, other), f"{file} imports {module}"
        allowed = other in BELOW_REPORT | {"report"} or module.startswith(f"{REGISTRY}.")
        assert part != "report" or allowed, f"{file}: the report reads records, not {module}"


def _ground(part: str, other: str) -> bool:
    """Return whether both are in the lowest layer, whose packages may import those named after them."""
    order = ["records", "config", "user_code", "errors", "formatting", "signing"]
    return part in order and other in order and order.index(part) < order.index(other)


@pytest.mark.parametrize(("file", "part"), [p for p in PARTS if p[1] in FREE_OF_TORCH], ids=str)
def test_free_of_torch(file: Path, part: str) -> None:
    assert not [module for module in imports(file) if module.split(".")[0] == "torch"], part


def test_no_part_is_forgotten() -> None:
    assert {part for _, part in PARTS} - {"__init__", "__main__"} <= LEVEL.keys()
