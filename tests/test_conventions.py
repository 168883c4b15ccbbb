"""Conventions that a reader relies on: one type per name, tests beside their source, docstrings that say the thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from paceline.config import DEFAULT_STRATEGY
from paceline.strategies.registry import ENTRIES

pytestmark = pytest.mark.takes(10)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "paceline"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
OUTSIDE_THE_PACKAGE = {
    "test_conventions.py",
    "test_docs.py",
    "test_fuzzing.py",
    "test_imports.py",
    "test_security.py",
}
"""Tests of the repository or a folder as a whole; tests/benchmarks and tests/examples mirror folders of that name."""
FORMATS_NUMBERS = {"formatting.py", "records/schema.py"}
"""The module that formats numbers for people, and the writers of CSV rows."""
NUMBER_FORMAT = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?\d*(?=[,_.eEfFgGn%])[,_]?(?:\.\d+)?[eEfFgGn%]?")
"""Format specification with a separator, a precision or a floating-point type; widths, hex digits and dates have none.
Those of plotly, which formats in the browser, are written in the same way."""
WAYS_OF_USE = Path("training/usage")
"""Folder with one test file for each topic of a user's training loop; the source is `Sync`."""
QUESTIONS = ("What", "Who", "Whose", "How", "Where", "Which", "Those")


def types_in(file: Path) -> set[str]:
    """Classes, and type aliases at the top of the file: names in CamelCase that a value is assigned to."""
    tree = ast.parse(file.read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id.lstrip("_")[:1].isupper() and not target.id.isupper():
                found.add(target.id)
    return found


def test_no_two_types_share_a_name() -> None:
    homes = defaultdict(list)
    for file in SOURCES:
        for name in types_in(file):
            homes[name].append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize("test", TESTS, ids=lambda test: str(test.relative_to(ROOT / "tests")))
def test_tests_mirror_the_source(test: Path) -> None:
    place = test.relative_to(ROOT / "tests")
    if place.name in OUTSIDE_THE_PACKAGE or place.parent == WAYS_OF_USE:
        return
    own_folder = place.parts[0] in ("benchmarks", "examples")
    source = (ROOT if own_folder else PACKAGE) / place.parent / place.stem.removeprefix("test_")
    assert source.is_dir() or source.with_suffix(".py").is_file(), f"{place} mirrors no source file or folder"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_docstrings_say_the_thing(file: Path) -> None:
    """A docstring that begins with a question word makes the reader guess; attribute docstrings count too."""
    texts = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    riddles = [f"{file.name}:{line}: {text[:60]}" for line, text in texts if text.lstrip().split(" ")[0] in QUESTIONS]
    assert riddles == []


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_depends_on_the_name_of_a_strategy(file: Path) -> None:
    """Behaviour follows from what a strategy, its plan or its record declares; `none` has other meanings too."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            names = constants & (ENTRIES.keys() if "strategy" in ast.unparse(node) else ENTRIES.keys() - {"none"})
            found += [f"{file.name}:{node.lineno}: {ast.unparse(node)}"] if names else []
    assert found == []


def test_one_constant_names_a_strategy() -> None:
    """A constant would hide the name from the test above; lists of strategies are options of a command."""
    found = []
    for file in SOURCES:
        if "strategies" not in file.parts:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                    found += [ast.unparse(node)] if node.value.value in ENTRIES.keys() - {"none"} else []
    assert found == [f"DEFAULT_STRATEGY = {DEFAULT_STRATEGY!r}"]


def number_formats(source: str) -> list[tuple[int, str]]:
    """Return the line and the specification of every number format: of f-strings, `format`, `%` and plotly."""
    found = []
    for node in ast.walk(ast.parse(source)):
        specifications: list[str] = []
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
            parts = node.format_spec.values
            specifications = ["".join(str(part.value) if isinstance(part, ast.Constant) else "9" for part in parts)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "format" and len(node.args) == 2:
            specifications = [str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ".9f"]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            specifications = re.findall(r"%([-+ #0-9.]*[eEfFgG])", str(node.left.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            specifications = re.findall(r"\{\w*:([^{}]+)\}", node.value)
        found += [(node.lineno, text) for text in specifications if NUMBER_FORMAT.fullmatch(text)]
    return found


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_one_module_formats_numbers(file: Path) -> None:
    """A figure reads the same wherever it is shown, because `formatting.py` alone chooses decimals and separators."""
    found = number_formats(file.read_text())
    assert found == [] or str(file.relative_to(PACKAGE)) in FORMATS_NUMBERS


@pytest.mark.parametrize(
    ("source", "formats"),
    [
        ('f"{x:.3g} {y:,} {z:,.{n}f} {s:g} {p:.1%}"', [".3g", ",", ",.9f", "g", ".1%"]),
        ('"{:.2f}".format(x)', [".2f"]),
        ('format(x, ".2f")', [".2f"]),
        ('"%.2f s" % x', [".2f"]),
        ('"%{meta}, step %{x}: %{y:.1e}"', [".1e"]),
        ('f"{name:<{width}} {step:>6} {number:03d} {byte:02x} {when:%B %Y, %H:%M} {x!r}"', []),
    ],
)
def test_number_formats_are_found(source: str, formats: list[str]) -> None:
    assert [text for _, text in number_formats(source)] == formats


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_prose_fits_120_columns(page: Path) -> None:
    """Tables and code may be wider: they cannot be wrapped."""
    wide, in_code = [], False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        in_code ^= line.startswith("```")
        if len(line) > 120 and not in_code and not line.startswith(("|", "    ", "![", "[!")):
            wide.append(number)
    assert wide == []
