"""Tests of data sets' names, options and folders."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.workloads import data


@pytest.mark.parametrize("function", [data.prepare, data.load])
def test_an_unknown_name_lists_the_known_ones(function: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no data set 'cifar100'") as caught:
        function("cifar100", data_dir=tmp_path)
    assert caught.value.hint == "did you mean 'cifar10'? known: cifar10, digits, svhn, synthetic"


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("digits:size=3", "digits takes no options, but size=3 was given"),
        ("synthetic:sise=3", "no synthetic option 'sise'"),
        ("synthetic:size=many", "synthetic:size='many' is not valid"),
        ("svhn:extra=perhaps", "svhn:extra='perhaps' is not valid"),
        ("cifar10:extra=true", "cifar10 takes no options, but extra=true was given"),
    ],
)
def test_wrong_options_are_named(spec: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=complaint):
        data.prepare(spec, data_dir=tmp_path)


@pytest.mark.parametrize("name", sorted(data.REGISTRY))
def test_a_data_set_describes_itself_and_is_named_alike(name: str) -> None:
    kind = data.REGISTRY[name]
    assert kind.__name__.lower() == name
    assert kind.__module__ == f"paceline.workloads.data.{name}"
    assert "for training" in str(kind.__doc__) or "generated in memory" in str(kind.__doc__)
    assert dataclasses.is_dataclass(kind)


def test_the_cache_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert data.default_data_dir() == tmp_path / "elsewhere" / "paceline"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert data.default_data_dir() == tmp_path / ".cache" / "paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.default_data_dir() == tmp_path / ".cache" / "paceline"


def test_the_launcher_can_prepare_without_torch_or_scipy() -> None:
    code = """
import sys
from pathlib import Path
from paceline.workloads import data
for spec in ("digits", "synthetic"):
    data.prepare(spec, data_dir=Path("/nonexistent"))
print(sorted({"torch", "scipy", "rich"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
