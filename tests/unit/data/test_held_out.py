"""data.dev as a share or a number: the content alone decides, so nothing is on both sides or ever changes."""

import json
import random
from pathlib import Path

import pytest

from glm_accelerate.config.schema import DataSection
from glm_accelerate.data.inputs import Inputs, open_held_out, open_inputs
from glm_accelerate.data.store import Store
from glm_accelerate.demo.tiny import build_tokenizer
from glm_accelerate.runtime.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer(["hello", " world"]).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"model_type": "glm4"}')
    return directory


def talk(number: int) -> str:
    turns = [{"role": "user", "content": f"ask {number}"}, {"role": "assistant", "content": f"say {number}"}]
    return json.dumps({"messages": turns})


def instruction(number: int) -> str:
    return json.dumps({"output": f"say {number}", "instruction": f"ask {number}"})


def opened(model: Path, dev: object, *lines: list[str], **more: object) -> Inputs:
    files: list[dict[str, object]] = []
    for number, one in enumerate(lines):
        path = model / f"{number}.jsonl"
        path.write_text("\n".join(one) + "\n")
        files.append({"path": str(path), "weight": 0.5 if number else 1.0})
    said = {"train": files, "dev": dev, "cache": str(model / "cache"), "workers": 1, **more}
    return open_inputs(DataSection.model_validate(said), model)


def contents(store: Store | None) -> set[int]:
    assert store is not None
    return {int(number) for part in store.parts for number in part.contents}


def test_nothing_is_on_both_sides_and_nothing_ever_changes_sides(model: Path) -> None:
    """Over data that is appended to, repeated, shuffled, written in another form and spread over files."""
    random.seed(0)
    first = [talk(number) for number in range(300)]
    more = [
        *first,
        *(talk(number) for number in range(300, 500)),
        *first[::2],
    ]
    shuffled = random.sample(more, len(more))
    before = opened(model, "10%", first)
    assert 15 <= len(contents(before.dev)) <= 45
    for lines in (
        [more],
        [shuffled],
        [shuffled[:400], shuffled[400:]],
        [first, list(map(instruction, range(80)))],
    ):
        after = opened(model, "10%", *lines)
        assert not contents(after.train) & contents(after.dev)
        assert contents(before.dev) <= contents(after.dev)
        assert contents(before.train) <= contents(after.train)
        assert len(after.dev or ()) == len(contents(after.dev)), "each content once"
        copies = sum(map(len, lines)) - len(after.train) - len(after.dev or ())
        assert (f"; {copies} more" in after.held_out) == (copies > 0)
    assert contents(opened(model, "10%", shuffled).dev) == contents(opened(model, 0.1, more).dev)


def test_what_a_number_holds_out_is_never_what_was_trained_on(model: Path) -> None:
    first = [talk(number) for number in range(100)]
    before = opened(model, 10, first * 2)
    assert len(before.dev or ()) == 10
    assert before.held_out == "10 samples of data.train, by content; 10 more with the same content left out"
    after = opened(model, 10, [*first, *(talk(number) for number in range(100, 200))])
    assert len(after.dev or ()) == 10
    assert contents(after.dev) != contents(before.dev)
    assert not contents(after.dev) & contents(before.train)


def test_the_samples_are_those_of_the_file_and_each_side_has_its_own_name(model: Path) -> None:
    lines = [talk(number) for number in range(50)]
    whole, split = opened(model, None, lines), opened(model, "20%", lines)
    assert split.dev is not None
    assert len(split.train) + len(split.dev) == 50
    assert split.train.lengths.sum() + split.dev.lengths.sum() == whole.train.lengths.sum()
    assert split.train.report.targets + split.dev.report.targets == whole.train.report.targets
    for store in (split.train, split.dev):
        for number in range(len(store)):
            assert whole.train[store[number].place.line - 1].tokens.tolist() == store[number].tokens.tolist()
    others = [split.train, split.dev, opened(model, "30%", lines).train, opened(model, 10, lines).train]
    assert len({whole.train.fingerprint, *(store.fingerprint for store in others)}) == 5
    assert len([one for one in (model / "cache").iterdir() if (one / "report.json").exists()]) >= 1


def test_the_parts_of_a_long_text_stay_together(model: Path) -> None:
    lines = [json.dumps({"text": f"{number} hello world " * 40}) for number in range(30)]
    split = opened(model, 3, lines, max_tokens=64)
    assert split.dev is not None
    assert len(split.dev) > 6
    assert len({split.dev[number].place.line for number in range(len(split.dev))}) == 3
    assert not contents(split.train) & contents(split.dev)


@pytest.mark.parametrize(
    ("dev", "what"),
    [("0.01%", "nothing held out"), (100, "nothing to train on"), (0.9999, "nothing to train on")],
)
def test_an_empty_side_is_refused(model: Path, dev: object, what: str) -> None:
    with pytest.raises(UserError, match=what):
        opened(model, dev, [talk(number) for number in range(20)])


def test_held_out_files_that_are_trained_on_are_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.jsonl").write_text(f"{instruction(3)}\n{instruction(300)}\n")
    inputs = opened(model, str(tmp_path / "dev.jsonl"), [talk(number) for number in range(20)])
    (warning,) = inputs.warnings
    assert warning.startswith("1 of 2 samples of data.dev are in data.train, too")
    assert opened(model, "20%", [talk(number) for number in range(20)]).warnings == []


def test_an_evaluator_opens_the_same(model: Path) -> None:
    lines = [talk(number) for number in range(50)]
    split = opened(model, "20%", lines)
    section = DataSection.model_validate(
        {"train": str(model / "0.jsonl"), "dev": "20%", "cache": str(model / "cache"), "workers": 1}
    )
    held_out = open_held_out(section, model)
    assert held_out.dev is not None
    assert split.dev is not None
    assert held_out.dev.fingerprint == split.dev.fingerprint
