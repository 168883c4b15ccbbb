"""Names with options, as users write them: parsed, split, and turned into dataclasses."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.specs import Spec, build, split_list
from paceline.errors import UsageError

WORDS = st.text(string.ascii_letters + string.digits + "_.", min_size=1, max_size=8)
VALUES = st.text(string.ascii_letters + string.digits + "_.-+/=", max_size=8)
NAMES = st.one_of(WORDS, st.tuples(WORDS, WORDS).map(":".join))
SPECS = st.builds(Spec, NAMES, st.dictionaries(WORDS, VALUES, max_size=4))


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("ddp", "ddp", {}),
        ("  ddp ", "ddp", {}),
        ("ddp:bucket_mb=1", "ddp", {"bucket_mb": "1"}),
        ("ddp: bucket_mb = 1 , overlap=no", "ddp", {"bucket_mb": "1", "overlap": "no"}),
        ("my.module:Class", "my.module:Class", {}),
        ("my.module:Class:rank=2", "my.module:Class", {"rank": "2"}),
        ("x:a=", "x", {"a": ""}),
        ("x:a=b=c", "x", {"a": "b=c"}),
    ],
)
def test_parse(text: str, name: str, options: dict[str, str]) -> None:
    assert Spec.parse(text) == Spec(name, options)


@pytest.mark.parametrize("text", ["", " ", ":a=1", "ddp:", "a:b:c:d=1", "a:b=1:c=2", "ddp::a=1"])
def test_parse_refuses_what_is_no_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a name with options") as caught:
        Spec.parse(text)
    assert "name:key=value" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "item"), [("ddp:a=1,b", "'b'"), ("ddp:a=1,", "''"), ("x:=3", "'=3'"), ("x: =3", "' =3'")]
)
def test_parse_names_the_option_without_a_value(text: str, item: str) -> None:
    with pytest.raises(UsageError, match=f"the option {item} in"):
        Spec.parse(text)


@given(SPECS)
def test_what_is_written_reads_back(spec: Spec) -> None:
    assert Spec.parse(str(spec)) == spec


@given(st.lists(SPECS, max_size=5))
def test_a_list_splits_where_names_start(specs: list[Spec]) -> None:
    assert [Spec.parse(item) for item in split_list(",".join(map(str, specs)))] == specs


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", []),
        (" , ,", []),
        ("a, b", ["a", "b"]),
        ("a,b:x=1,y=2,c", ["a", "b:x=1,y=2", "c"]),
        ("b:x=1,b:y=2", ["b:x=1", "b:y=2"]),
        ("m:C:x=1,y=2,ddp", ["m:C:x=1,y=2", "ddp"]),
    ],
)
def test_split_list(text: str, items: list[str]) -> None:
    assert split_list(text) == items


@dataclass(frozen=True)
class Every:
    """One field of each type that can be written."""

    whole: int = 1
    number: float = 1.0
    flag: bool = False
    word: str = "w"
    shape: tuple[int, ...] = ()
    kind: Literal["sync", "local"] = "sync"
    maybe: int | None = 3
    maybe_flag: bool | None = None


@dataclass(frozen=True)
class Nothing:
    """No field at all."""


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("whole", "-7", -7),
        ("number", "2.5e-3", 0.0025),
        ("number", "4", 4.0),
        *[("flag", text, True) for text in ("true", "True", "YES", "on", "1")],
        *[("flag", text, False) for text in ("false", "False", "NO", "off", "0")],
        ("word", "any", "any"),
        ("word", "none", "none"),
        ("shape", "3x32x32", (3, 32, 32)),
        ("shape", "7", (7,)),
        ("kind", "local", "local"),
        ("maybe", "None", None),
        ("maybe", "5", 5),
        ("maybe_flag", "none", None),
        ("maybe_flag", "on", True),
    ],
)
def test_build_converts(key: str, text: str, value: Any) -> None:
    made = getattr(build(Every, {key: text}, "it"), key)
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("whole", "1.5", "a whole number"),
        ("whole", "none", "a whole number"),
        ("number", "fast", "a number"),
        ("flag", "maybe", "true or false"),
        ("flag", "2", "true or false"),
        ("shape", "3x", "numbers as 3x32x32"),
        ("maybe", "x", "a whole number"),
    ],
)
def test_build_refuses_a_wrong_value(key: str, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(Every, {key: text}, "it")
    assert caught.value.message == f"it:{key}={text!r} is not valid."
    assert caught.value.hint == f"it takes {expected}"


def test_build_refuses_a_value_outside_the_choices() -> None:
    with pytest.raises(UsageError, match="it:kind cannot be 'sinc'") as caught:
        build(Every, {"kind": "sinc"}, "it")
    assert caught.value.hint == "did you mean 'sync'? choices: local, sync"


def test_build_offers_the_nearest_option() -> None:
    with pytest.raises(UsageError, match="there is no it option 'shap'") as caught:
        build(Every, {"shap": "1"}, "it")
    assert "did you mean 'shape'?" in (caught.value.hint or "")


def test_build_says_when_there_are_no_options_at_all() -> None:
    assert build(Nothing, {}, "it") == Nothing()
    with pytest.raises(UsageError, match="it takes no options, but a=1 was given"):
        build(Nothing, {"a": "1"}, "it")


def test_build_refuses_a_type_that_cannot_be_written() -> None:
    @dataclass
    class Odd:
        table: dict = None  # type: ignore[type-arg, assignment]

    Odd.__annotations__ = {"table": dict}
    with pytest.raises(TypeError, match="cannot be written on a command line"):
        build(Odd, {"table": "1"}, "it")
