import json
from collections import Counter
from pathlib import Path

import pytest

from glm_accelerate.demo.task import (
    LESSONS,
    by_digit,
    examples,
    in_english,
    is_held_out,
    vocabulary,
    write_examples,
)
from glm_accelerate.demo.tiny import build_tokenizer


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (7, "seven"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (205, "two hundred five"),
        (719, "seven hundred nineteen"),
        (980, "nine hundred eighty"),
    ],
)
def test_numbers_in_english(number: int, words: str) -> None:
    assert in_english(number) == words


def test_every_number_has_words_of_its_own() -> None:
    assert len({in_english(number) for number in range(1000)}) == 1000
    assert by_digit(905) == "九、零、五"


def test_the_same_seed_gives_the_same_examples() -> None:
    assert examples(50, seed=3, held_out=False) == examples(50, seed=3, held_out=False)
    assert examples(50, seed=3, held_out=False) != examples(50, seed=4, held_out=False)


def test_the_lessons_come_in_equal_parts_and_both_languages() -> None:
    made = examples(500, seed=0, held_out=False)
    assert Counter(example.lesson for example in made) == dict.fromkeys(LESSONS, 100)
    chinese = sum(not example.question.isascii() for example in made)
    assert 150 < chinese < 350


def test_what_is_held_out_occurs_in_no_training_example() -> None:
    train, held_out = examples(5000, seed=1, held_out=False), examples(500, seed=2, held_out=True)
    seen = {example.combination for example in train}
    assert not any(example.combination in seen for example in held_out)
    assert not {example.question for example in train} & {example.question for example in held_out}
    assert all(is_held_out(example.combination) for example in held_out)


def test_every_question_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for example in examples(5000, seed=1, held_out=False):
        assert answers.setdefault(example.question, example.answer) == example.answer


def test_lengths_have_a_long_tail() -> None:
    tokenizer = build_tokenizer(vocabulary())
    lengths = sorted(
        len(tokenizer.encode(f"{example.question}\n{example.answer}").ids)
        for example in examples(2000, seed=1, held_out=False)
    )
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]


def test_the_tokenizer_knows_every_word_of_the_lessons() -> None:
    tokenizer = build_tokenizer(vocabulary())
    for example in examples(300, seed=1, held_out=True):
        text = f"{example.question}\n{example.answer}"
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids) == text
        assert all("�" not in tokenizer.decode([number]) for number in encoded.ids), text


def test_files_have_the_form_of_ones_own_data(tmp_path: Path) -> None:
    made = examples(10, seed=0, held_out=False)
    write_examples(tmp_path / "train.jsonl", made)
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["messages"] for line in lines]
    assert [[turn["role"] for turn in messages] for messages in turns] == [["user", "assistant"]] * 10
    assert [messages[1]["content"] for messages in turns] == [example.answer for example in made]
