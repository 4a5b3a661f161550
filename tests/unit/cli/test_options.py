import argparse
from pathlib import Path

import pytest

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import UserError

STOCK = """
data_config: {train_file: t.jsonl}
max_input_length: 64
max_output_length: 64
training_args: {output_dir: o, max_steps: 9, per_device_train_batch_size: 2}
"""


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.config_arguments(parser)
    parser.add_argument("--flag", action="store_true")
    return parser.parse_intermixed_args(list(words))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    path.write_text("model: {path: m}\ndata: {train: t.jsonl}\n")
    return str(path)


@pytest.fixture
def stock(tmp_path: Path) -> str:
    path = tmp_path / "lora.yaml"
    path.write_text(STOCK)
    return str(path)


def test_overrides_may_stand_on_either_side_of_an_option(config: str) -> None:
    args = parsed(config, "train.steps=3", "--flag", "train.seed=4")
    read = options.config_from(args)
    assert (read.train.steps, read.train.seed, args.flag) == (3, 4, True)
    assert options.config_name(args) == "my"


def test_a_preset_has_its_own_name() -> None:
    args = parsed("preset:glm4-9b-0414-lora", "data.train=my.jsonl")
    assert options.config_from(args).data.train[0].path == "my.jsonl"
    assert options.config_name(args) == "glm4-9b-0414-lora"


def test_stock_files_take_overrides_and_ranks(stock: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = parsed("--stock-config", stock, "data", "model", "--stock-ranks", "8", "train.seed=5")
    read = options.config_from(args)
    assert (read.train.step_samples, read.train.steps, read.train.seed) == (16, 9, 5)
    assert (read.model.path, read.data.train[0].path) == ("model", "data/t.jsonl")
    assert options.config_name(args) == "lora"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "max_steps -> train.steps=9" in shown.err
    assert "output_dir: the run directory is" in shown.err


def test_what_does_not_fit_together_is_refused(config: str, stock: str) -> None:
    for args in (parsed(), parsed("train.steps=3")):
        with pytest.raises(UserError, match="a config is needed"):
            options.config_from(args)
    with pytest.raises(UserError, match="a config is needed"):
        options.config_name(parsed())
    with pytest.raises(UserError, match="exclude each other"):
        options.config_from(parsed(config, "--stock-config", stock, "data", "model"))
    with pytest.raises(UserError, match="--stock-ranks is 0"):
        options.config_from(parsed("--stock-config", stock, "data", "model", "--stock-ranks", "0"))


def test_a_config_may_be_left_out_where_the_verb_allows_it(config: str, stock: str) -> None:
    assert not options.has_config(parsed())
    assert options.has_config(parsed(config))
    assert options.has_config(parsed("--stock-config", stock, "data", "model"))


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "lr=1.yaml"
    path.write_text("model: {path: m}\ndata: {train: t.jsonl}\n")
    assert options.config_from(parsed(str(path))).model.path == "m"
