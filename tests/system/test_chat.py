"""`chat` and `evaluate` as a person runs them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_accelerate.data.encode import encode_prompt
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.types import Message
from glm_accelerate.demo.tiny import build_tokenizer
from glm_accelerate.generate.answer import generate
from glm_accelerate.models.weights import load_model

VERB = [sys.executable, "-m", "glm_accelerate.cli.main"]


@pytest.fixture
def model_dir(make_model: Callable[..., Path]) -> Path:
    tokenizer = build_tokenizer(["hello", " world"])
    directory = make_model("glm4", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=100_000)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def answer_of(directory: Path, question: str, new: int) -> str:
    model, tokenizer, template = load_model(directory), load_tokenizer(directory), get_template("glm4-0414")
    prompt = encode_prompt([Message("user", question)], template, tokenizer)
    stops = {tokenizer.special(name) for name in template.stops}
    (ids,) = generate(model.eval(), [prompt], stops=stops, max_new_tokens=new)
    return tokenizer.decode(ids).lstrip()


def shown(text: str) -> str:
    """Control characters never reach the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else chr(0x2400 + ord(c)) for c in text)


def test_one_question(model_dir, warm):
    done = warm("chat", str(model_dir), "--ask", "hello", "--max-new-tokens", "12").done()
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown(answer_of(model_dir, "hello", 12)) + "\n"


def test_help_is_not_a_question(model_dir):
    words = [*VERB, "chat", str(model_dir), "--max-new-tokens", "4"]
    done = subprocess.run(words, input="/help\n/?\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("/clear forgets the conversation") == 3
    assert "".join(done.stdout.split("/help shows this.")).count("\n> ") == 3


def test_what_is_no_text_is_asked_all_the_same(model_dir):
    """As typed in another encoding; the conversation goes on."""
    words = [*VERB, "chat", str(model_dir), "--max-new-tokens", "4"]
    surroundings = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(words, input=b"hello\xff\nhello\n", capture_output=True, env=surroundings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().count("> ") == 3
    assert b"bug" not in done.stderr


def test_a_conversation_in_which_an_answer_is_broken_off(model_dir, spawn):
    words = [*VERB, "chat", str(model_dir), "--max-new-tokens", "90000"]
    chat = spawn(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert chat.stdin is not None
    assert chat.stdout is not None
    assert b"Ctrl-C" in chat.stdout.readline()
    chat.stdin.write(b"hello\n")
    chat.stdin.flush()
    assert len(chat.stdout.read(40)) == 40  # it streams: 90,000 tokens would take minutes
    chat.send_signal(signal.SIGINT)
    chat.stdin.write(b"/clear\n")
    rest, complaints = chat.communicate(timeout=120)  # and the end of input is Ctrl-D
    assert chat.returncode == 0, complaints
    assert "broken off" in rest.decode()
    assert not complaints


def test_a_table_of_what_was_measured(model_dir, tmp_path, warm):
    data = tmp_path / "dev.jsonl"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    good = [turns[0], {"role": "assistant", "content": shown(answer_of(model_dir, "hello", 6))}]
    data.write_text("".join(json.dumps({"messages": case}) + "\n" for case in (turns, good)))
    words = ["evaluate", str(model_dir), "--data", str(data), "--metrics", "loss", "exact_match"]
    done = warm(*words, "--max-new-tokens", "6", "--predictions", str(tmp_path / "said.jsonl")).done()
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stdout
    assert "exact_match" in done.stdout
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [case["prompt"] for case in said] == ["[gMASK]<sop><|user|>\nhello<|assistant|>"] * 2
    assert "\nworld" in {case["reference"] for case in said}
