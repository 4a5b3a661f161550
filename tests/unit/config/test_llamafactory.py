"""LLaMA-Factory's example files, written out in our own short form, and each key that its classes have."""

import json
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.config.llamafactory import MAPPED, OWN, load_llamafactory
from glm_accelerate.config.llamafactory_keys import ARGUMENTS, NOTED, ONLY
from glm_accelerate.config.trainer import Imported
from glm_accelerate.runtime.errors import UserError

LORA = {
    "model_name_or_path": "THUDM/GLM-4-9B-0414",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "one,two",
    "template": "glm4",
    "cutoff_len": 1024,
    "max_samples": 1000,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "output_dir": "saves",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
INFO = {
    "one": {"file_name": "one.json"},
    "two": {
        "file_name": "two.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "sys"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "me", "assistant_tag": "it"},
    },
    "wiki": {"file_name": "wiki.jsonl", "columns": {"prompt": "body"}},
    "hub": {"hf_hub_url": "someone/something"},
    "pairs": {"file_name": "p.json", "ranking": True, "columns": {"prompt": "q", "chosen": "a"}},
}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def do(ranks: int = 1, info: Any = None, **changes: Any) -> Imported:
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO | (info or {})))
        path = tmp_path / "examples/train/some.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {key: value for key, value in {**LORA, **changes}.items() if value is not ...}
        path.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items()))
        return load_llamafactory(path, ranks)

    return do


def test_a_lora_example_means_what_it_means_there(read: Any, tmp_path: Path) -> None:
    config = read(ranks=2).config
    assert config.model.path == "THUDM/GLM-4-9B-0414"
    assert (config.adapt.method, config.adapt.rank, config.adapt.alpha) == ("lora", 8, 16)  # twice the rank
    assert (config.adapt.dropout, config.adapt.targets) == (0.0, "all-linear")
    assert (config.data.max_tokens, config.data.dev) == (1024, None)
    one, two = config.data.train
    assert (one.path, one.first) == (str(tmp_path / "data/one.json"), 1000)
    assert one.columns == {"instruction": "instruction", "input": "input", "output": "output"}
    assert two.columns == {"conversations": "talk", "system": "sys"}
    assert two.tags == {"from": "who", "value": "says", "human": "me", "gpt": "it"}
    assert (config.train.step_samples, config.train.epochs) == (16, 3)
    assert (config.optim.learning_rate, config.optim.schedule, config.optim.warmup) == (1e-4, "cosine", 0.1)


def test_every_key_of_a_file_is_accounted_for(read: Any) -> None:
    said = {note.key.split(".")[-1] for note in read().notes}
    assert {key for key, value in LORA.items() if value is not None} <= said


def test_what_is_learnt_to_stop_by_differs_and_is_said(read: Any) -> None:
    [note] = [note for note in read().notes if note.key == "template"]
    assert "<|endoftext|>" in note.why


@pytest.mark.parametrize(
    ("changes", "where", "value"),
    [
        ({"finetuning_type": "full"}, "adapt.method", "full"),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": 3}, "adapt.layers", 3),
        ({"quantization_bit": 4, "quantization_method": "bnb"}, "adapt.base", "nf4"),
        ({"quantization_bit": 8}, "adapt.base", "int8"),
        ({"lora_alpha": 64}, "adapt.alpha", 64),
        ({"lora_target": "q_proj, v_proj"}, "adapt.targets", ["q_proj", "v_proj"]),
        ({"mask_history": True}, "data.train_on", "last"),
        ({"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50}, "data.dev", 0.1),
        ({"val_size": 100, "eval_strategy": "steps", "eval_steps": 50}, "evaluate.every", 50),
        ({"packing": True}, "train.step_tokens", 8 * 1024),
        ({"stage": "pt", "dataset": "wiki"}, "data.format", "text"),
        ({"stage": "pt", "dataset": "wiki"}, "train.step_tokens", 8 * 1024),
        ({"early_stopping_steps": 3, "val_size": 9, "eval_strategy": "epoch"}, "evaluate.stop_after", 3),
        ({"max_steps": 30}, "train.steps", 30),
        ({"report_to": "tensorboard", "use_swanlab": True}, "observe.sinks", ["tensorboard", "swanlab"]),
    ],
)
def test_a_key_becomes_a_setting(read: Any, changes: dict[str, Any], where: str, value: Any) -> None:
    section, name = where.split(".")
    assert getattr(getattr(read(**changes).config, section), name) == value


def test_text_is_the_column_of_prompts(read: Any) -> None:
    [source] = read(stage="pt", dataset="wiki").config.data.train
    assert source.columns == {"text": "body"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stage": "dpo"}, "`stage` is dpo"),
        ({"finetuning_type": "oft"}, "`finetuning_type` is oft"),
        ({"use_dora": True}, "`use_dora` is True"),
        ({"template": "qwen"}, "`template` is qwen"),
        ({"lora_rnak": 8}, "`lora_rnak` is not understood"),
        ({"learning_rat": 8}, "`learning_rat` is not understood"),
        ({"dataset": "three"}, "there is no data set three"),
        ({"dataset": "hub"}, "`hf_hub_url`"),
        ({"dataset": "pairs"}, "`ranking` is True"),
        ({"dataset": ...}, "`dataset` is missing"),
        ({"dataset_dir": "elsewhere"}, "needs elsewhere/dataset_info.json"),
        ({"adapter_name_or_path": "saves"}, "is not part of a config here"),
        ({"mix_strategy": "interleave_under"}, "`mix_strategy` is interleave_under"),
        ({"freeze_trainable_layers": -2, "finetuning_type": "freeze"}, "the last layers train here"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(read: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read(**changes)
    assert said in str(refused.value)


def test_no_key_means_two_things() -> None:
    tables = [set(MAPPED.split()), set(NOTED), set(ONLY), set(ARGUMENTS)]
    assert sum(map(len, tables)) == len(set().union(*tables)) == len(OWN)


def test_a_wrong_entry_of_a_data_set_is_refused_by_name(read: Any) -> None:
    for entry, said in [
        ({"columns": {"images": "i"}}, "images"),
        ({"formatting": "raw"}, "raw"),
        ({"columns": {"messages": "m"}, "tags": {"rol": "x"}, "formatting": "sharegpt"}, "rol"),
        ({"num_samples": 3}, "num_samples"),
    ]:
        with pytest.raises(UserError) as refused:
            read(info={"bad": {"file_name": "one.json"} | entry}, dataset="bad")
        assert said in str(refused.value)
