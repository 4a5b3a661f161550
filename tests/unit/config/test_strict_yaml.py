import pytest

from glm_accelerate.config.strict_yaml import read_document, read_value
from glm_accelerate.runtime.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("5E8", 5e8), (".5", 0.5), ("-1.", -1.0), ("+3", 3), ("0", 0), ("-0.0", 0.0),
        ("010", 10), ("0o10", 8), ("0x1F", 31), ("1_000", "1_000"), ("1:30", "1:30"), ("0b1", "0b1"),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("Y", "Y"), ("true", True),
        ("False", False),
        ("null", None), ("~", None), ("", None), ("nil", "nil"), ("2026-01-01", "2026-01-01"),
        ("'1e-5'", "1e-5"), ('"true"', "true"), ("=", "="), ("e5", "e5"), ("-", None), ("1e", "1e"),
        ("中文", "中文"), ("[1, [a]]", [1, ["a"]]), ("{a: 1}", {"a": 1}), ("a\\b", "a\\b"),
    ],
)  # fmt: skip
def test_scalars_are_what_a_person_means(text: str, value: object) -> None:
    if text == "-":
        assert read_value(text, "x") == [None]
    else:
        found = read_value(text, "x")
        assert found == value
        assert type(found) is type(value)


def test_every_key_has_its_line() -> None:
    document = read_document("a:\n  b: 1\n  c:\n  - x\n  -\n    d: 2\n", "f")
    assert document.values == {"a": {"b": 1, "c": ["x", {"d": 2}]}}
    assert document.place(("a", "b")) == "f:2"
    assert document.place(("a", "c", 0)) == "f:4"
    assert document.place(("a", "c", 1, "d")) == "f:6"
    assert document.place(("a", "nothing", "there")) == "f:1"
    assert document.place(("other",)) == "f"


def test_an_empty_text_says_nothing() -> None:
    for text in ("", "\n", "# only a comment\n", "---\n"):
        assert read_document(text, "f").values == {}


def test_a_key_is_said_once() -> None:
    with pytest.raises(UserError, match=r"^f:3: `b` is said twice, first at f:2$"):
        read_document("a:\n  b: 1\n  b: 1\n", "f")
    with pytest.raises(UserError, match=r"^f:2: `a` is said twice"):
        read_document("a: 1\na: 2\n", "f")


def test_windows_line_ends_are_line_ends() -> None:
    document = read_document("a: 1\r\nb: x\r\n", "f")
    assert document.values == {"a": 1, "b": "x"}
    assert document.place(("b",)) == "f:2"
