"""Lines of a file, and every way in which they can be bad: one message with file, line and cure."""

import json
import subprocess
from pathlib import Path

import pytest

from glm_accelerate.data.read import find_format, parse_line, read, read_lines
from glm_accelerate.data.types import Conversation, FilePlace, Message
from glm_accelerate.runtime.errors import UserError

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
TURNS = (Message("user", "q"), Message("assistant", "a"))


def write(path: Path, *lines: object) -> Path:
    """JSON for objects, bytes as they are."""
    body = [
        line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines
    ]
    path.write_bytes(b"\n".join(body) + b"\n")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def test_lines_end_at_newline_bytes_only(file: Path) -> None:
    text = "one\u2028two\u0085three\u000cfour\u001e"
    write(file, GOOD, {"text": text})
    with pytest.raises(UserError, match="'messages' is missing"):
        list(read(file))
    assert [place.line for place, _ in read_lines(file)] == [1, 2]
    assert next(iter(read(write(file, {"text": text})))).text == text


def test_bom_blank_lines_and_windows_line_ends(file: Path) -> None:
    file.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n  \n" + json.dumps(GOOD).encode()
    )
    found = list(read(file))
    assert found == [Conversation(TURNS, FilePlace(str(file), line)) for line in (1, 4)]


@pytest.mark.parametrize("size", [1, 7, 50, 90, 1000])
def test_ranges_together_are_the_file(file: Path, size: int) -> None:
    write(file, *[{"text": "x" * count} for count in (3, 80, 0, 41, 7)], b"", b'{"text": "last"}')
    whole = [raw for _, raw in read_lines(file)]
    end = file.stat().st_size
    parts = [raw for start in range(0, end, size) for _, raw in read_lines(file, start, start + size)]
    assert parts == whole
    assert len(whole) == 6


def test_a_range_counts_lines_from_where_it_is_told(file: Path) -> None:
    write(file, {"text": "a"}, {"text": "b"}, {"text": "c"})
    start = len(b'{"text": "a"}\n')
    assert [place.line for place, _ in read_lines(file, start, None, line=2)] == [2, 3]


HOSTILE = [
    (b'{"messages": [}', r":2:15: broken JSON: Expecting value near .*mend or remove the line"),
    (b'{"messages": []', r":2:16: broken JSON"),
    (b'{"a": "\x1b[31m', r":2:8: broken JSON: .*near .*x1b\[31m"),
    ('{"text": "你好"}'.encode("gbk"), r":2: is not UTF-8 but likely GBK, at byte 10 .*iconv -f GB18030"),
    (b'{"text": "\xff\xff"}', r":2: is not UTF-8, at byte 10"),
    (b'{"text": "\\ud800"}', r":2: half of a surrogate pair \(\\ud800\)"),
    (b'{"text": "\\uDC00x"}', r":2: half of a surrogate pair"),
    (b'{"text": NaN}', r":2: NaN is not JSON"),
    (b'{"text": -Infinity}', r":2: -Infinity is not JSON"),
    (b'{"text": "a", "x": 1e400}', r":2: the number '1e400' is too large"),
    (b'{"text": "a", "text": "b"}', r":2: the key 'text' stands twice"),
    (b'{"messages": ' + b"[" * 100_000, r":2: JSON nested too deeply"),
    (b'{"text": "a", "id": ' + b"7" * 5000 + b"}", r":2: a number of thousands of digits"),
    (b"[1, 2]", r":2: a line is an array, not an object"),
    (b'"words"', r":2: a line is str, not an object"),
    (b'{"messages": {}}', r":2: messages is not a list of objects"),
    (b'{"messages": []}', r":2: messages is empty"),
    (b'{"messages": ["hello"]}', r":2: messages is not a list of objects"),
    (b'{"question": "q"}', r":2: the field 'messages' is missing"),
    (b'{"messages": [{"content": "q"}]}', r":2: messages\[0\] has no role .*one of system, user"),
    (b'{"messages": [{"role": "bot", "content": "q"}]}', r":2: messages\[0\]\.role is 'bot' .*, tool"),
    (b'{"messages": [{"role": ["user"], "content": "q"}]}', r":2: messages\[0\]\.role is \['user'\]"),
    (b'{"messages": [{"role": "user"}]}', r":2: the field 'messages\[0\]\.content' is missing"),
    (b'{"messages": [{"role": "user", "content": 7}]}', r":2: messages\[0\]\.content is int, not a string"),
    (b'{"messages": [{"role": "user", "content": "q"}], "tools": 3}', r":2: tools is not a list"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), HOSTILE)
def test_a_bad_line_is_named(file: Path, line: bytes, said: str) -> None:
    write(file, GOOD, line, GOOD)
    with pytest.raises(UserError, match=rf"^[^\n]*train\.jsonl{said}[^\n]*$"):
        list(read(file))
    assert len(list(read(file, skip_bad=1))) == 2


def test_the_budget_of_bad_lines_ends(file: Path) -> None:
    write(file, b"{", GOOD, b"{", b"{")
    assert len(list(read(file, skip_bad=3))) == 1
    with pytest.raises(UserError, match=r":4:2: broken JSON.*after 2 bad lines that were skipped"):
        list(read(file, skip_bad=2))


def test_surrogate_pairs_and_nul_are_text(file: Path) -> None:
    write(file, b'{"text": "\\ud83d\\ude42 \\u0000"}')
    assert [conversation.text for conversation in read(file)] == ["🙂 \0"]


@pytest.mark.parametrize("body", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_empty_file(file: Path, body: bytes) -> None:
    file.write_bytes(body)
    with pytest.raises(UserError, match=r"train\.jsonl: the data file is empty"):
        list(read(file))
    with pytest.raises(UserError, match="empty"):
        list(read(file, "text"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        list(read(tmp_path / "none.jsonl"))


def test_utf16_is_recognised(file: Path) -> None:
    file.write_bytes(json.dumps(GOOD).encode("utf-16"))
    with pytest.raises(UserError, match=r"is UTF-16, not UTF-8, at byte 0.*iconv -f UTF-16"):
        list(read(file))
    file.write_bytes(json.dumps(GOOD).encode("utf-16-le"))
    with pytest.raises(UserError, match=r"NUL bytes: is the file UTF-16.*iconv"):
        list(read(file))


def run_cure(error: UserError) -> None:
    """What is printed, run as it stands."""
    assert error.cure is not None
    subprocess.run(["bash", "-ec", error.cure], check=True)


@pytest.mark.process
def test_the_cure_of_another_encoding_can_be_run(tmp_path: Path) -> None:
    file = tmp_path / "my talk; x.jsonl"
    file.write_bytes(json.dumps({"text": "你好"}, ensure_ascii=False).encode("gbk"))
    with pytest.raises(UserError, match="likely GBK") as caught:
        list(read(file))
    run_cure(caught.value)
    assert [said.text for said in read(tmp_path / "utf8-my talk; x.jsonl")] == ["你好"]


@pytest.mark.parametrize(
    ("magic", "said"),
    [
        (b"\x28\xb5\x2f\xfd", "cannot be read as zstd"),
        (b"\x1f\x8b", "cannot be read as gzip"),
        (b"PAR1", "cannot be read as parquet"),
        (b"ARROW1", "cannot be read as arrow"),
        (b"\xff\xff\xff\xff", "cannot be read as arrow stream"),
        (b"PK\x03\x04", r"is packed with zip \(unzip -p"),
    ],
)
def test_what_else_holds_no_lines_is_named(file: Path, magic: bytes, said: str) -> None:
    file.write_bytes(magic + bytes(100))
    with pytest.raises(UserError, match=said):
        list(read(file))


def test_a_tilde_is_the_home(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(write(file, GOOD).parent))
    assert len(list(read(Path("~/train.jsonl")))) == 1


@pytest.mark.parametrize("depth", [*range(900, 1010), 3000, 200_000])
def test_depth_never_ends_in_a_traceback(file: Path, depth: int) -> None:
    """Reading, looking for surrogates and writing need different shares of the stack."""
    deep = b"[" * depth + b"]" * depth
    surrogate = b'{"text": "\\ud83d\\ude42", "x": ' + deep + b"}"
    result = b'{"messages": [{"role": "tool", "content": {"x": ' + deep + b"}}]}"
    assert len(list(read(write(file, {"text": "a"}, surrogate), skip_bad=1))) in (1, 2)
    assert len(list(read(write(file, GOOD, result), skip_bad=1))) in (1, 2)


def test_a_long_line(file: Path) -> None:
    write(file, {"text": "word " * 400_000})
    [found] = read(file)
    assert len(found.text or "") == 2_000_000


FORMS = [
    (GOOD, "messages"),
    ({"conversations": GOOD["messages"]}, "conversations"),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "sharegpt"),
    ({"instruction": "q", "input": "", "output": "a"}, "alpaca"),
    ({"prompt": "q", "response": "a", "history": []}, "alpaca"),
    ({"content": "q", "summary": "a"}, "alpaca"),
]


@pytest.mark.parametrize(("line", "form"), FORMS)
def test_forms_are_told_from_their_keys(file: Path, line: object, form: str) -> None:
    write(file, line)
    assert find_format(file) == form
    assert [conversation.messages for conversation in read(file)] == [TURNS]


def test_plain_text(file: Path) -> None:
    assert list(read(write(file, {"text": "t"}))) == [Conversation((), FilePlace(str(file), 1), "t")]


def test_a_format_that_was_asked_for_is_not_guessed(file: Path) -> None:
    write(file, {"text": "t", "instruction": "q", "output": "a"})
    assert find_format(file, "text") == "text"
    assert find_format(file) == "alpaca"


def test_unknown_keys_are_listed(file: Path) -> None:
    with pytest.raises(UserError, match=r":1: cannot tell the form of a line with the keys 'q', 'a' "):
        list(read(write(file, {"q": 1, "a": 2})))


def test_parse_line_takes_one_line() -> None:
    place = FilePlace("f", 9)
    assert parse_line(json.dumps(GOOD).encode(), place, "messages") == Conversation(TURNS, place)
