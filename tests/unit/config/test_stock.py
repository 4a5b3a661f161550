"""The settings of the published fine-tuning YAML files, written out in our own short form."""

import json
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.config.load import to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.config.stock import load_stock
from glm_accelerate.config.trainer import Imported
from glm_accelerate.runtime.errors import UserError

COMMON = {
    "output_dir": "./output",
    "max_steps": 3000,
    "dataloader_num_workers": 16,
    "remove_unused_columns": False,
    "save_strategy": "steps",
    "save_steps": 500,
    "log_level": "info",
    "logging_strategy": "steps",
    "logging_steps": 10,
    "eval_steps": 500,
    "predict_with_generate": True,
    "generation_config": {"max_new_tokens": 512},
}
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 32, "lora_dropout": 0.1}


def glm4(**args: Any) -> dict[str, Any]:
    """GLM-4: sft.yaml, and with `peft_config` lora.yaml."""
    return {
        "data_config": {
            f"{split}_file": f"{name}.jsonl"
            for split, name in (("train", "train"), ("val", "dev"), ("test", "dev"))
        }
        | {"num_proc": 1},
        "combine": True,
        "freezeV": True,
        "max_input_length": 512,
        "max_output_length": 512,
        "training_args": COMMON
        | {
            "learning_rate": 5e-4,
            "per_device_train_batch_size": 1,
            "eval_strategy": "steps",
            "per_device_eval_batch_size": 4,
        }
        | args,
    }


def chatglm3(peft: dict[str, Any] | None, **args: Any) -> dict[str, Any]:
    """ChatGLM3: sft.yaml, lora.yaml and ptuning_v2.yaml."""
    stock = {
        "data_config": {
            "train_file": "train.json",
            "val_file": "dev.json",
            "test_file": "dev.json",
            "num_proc": 16,
        },
        "max_input_length": 256,
        "max_output_length": 512,
        "training_args": COMMON
        | {
            "learning_rate": 3e-4,
            "per_device_train_batch_size": 4,
            "use_cpu": False,
            "per_device_eval_batch_size": 16,
            "evaluation_strategy": "steps",
        }
        | args,
    }
    return stock if peft is None else stock | {"peft_config": peft}


def read(tmp_path: Path, stock: dict[str, Any], ranks: int = 1) -> Imported:
    path = tmp_path / "stock.yaml"
    path.write_text(json.dumps(stock, indent=1))  # JSON is YAML
    return load_stock(path, "data/Adv", "THUDM/GLM", ranks)


def complaint(tmp_path: Path, stock: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        read(tmp_path, stock)
    return str(caught.value).replace(f"{tmp_path}/", "")


def keys(stock: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in stock.items():
        nested = isinstance(value, dict) and key != "deepspeed"
        found |= keys(value, f"{prefix}{key}.") if nested else {prefix + key}
    return found


def test_glm4_lora_as_it_is_shipped(tmp_path: Path) -> None:
    peft = LORA | {"target_modules": ["q_proj", "k_proj", "v_proj"]}
    config = read(tmp_path, glm4() | {"peft_config": peft}).config
    assert config == RunConfig.model_validate(
        {
            "model": {"path": "THUDM/GLM"},
            "adapt": {
                "method": "lora",
                "rank": 8,
                "alpha": 32,
                "dropout": 0.1,
                "targets": peft["target_modules"],
            },
            "data": {
                "train": "data/Adv/train.jsonl",
                "dev": "data/Adv/dev.jsonl",
                "max_tokens": 1024,
                "train_on": "last",
            },
            "train": {"steps": 3000, "step_samples": 1, "seed": 42},
            "optim": {
                "learning_rate": 5e-4,
                "schedule": "linear",
                "warmup": 0.0,
                "weight_decay": 0.0,
                "clip": 1.0,
                "betas": (0.9, 0.999),
                "epsilon": 1e-8,
            },
            "checkpoint": {"every": 500},
            "evaluate": {"every": 500, "max_new_tokens": 512},
        }
    )


def test_glm4_full_fine_tuning_with_zero3(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    zero = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
        },
        "zero_optimization": {"stage": 3, "allgather_bucket_size": 5e8, "overlap_comm": True},
    }
    (tmp_path / "configs/ds_zero_3.json").write_text(json.dumps(zero))
    stock = glm4(learning_rate=5e-5, deepspeed="configs/ds_zero_3.json")
    config = read(tmp_path, stock, ranks=8).config
    assert (config.adapt.method, config.parallel.shard) == ("full", "full")
    assert (config.optim.learning_rate, config.train.step_samples) == (5e-5, 8)


def test_chatglm3_as_it_is_shipped(tmp_path: Path) -> None:
    lora = read(tmp_path, chatglm3(LORA | {"r": 32}, save_steps=2000)).config
    assert (lora.adapt.rank, lora.adapt.targets) == (32, ["query_key_value"])
    assert (lora.checkpoint.every, lora.data.max_tokens, lora.data.train_on) == (2000, 768, "all")
    prefix = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 128}
    tuned = read(tmp_path, chatglm3(prefix)).config
    assert (tuned.adapt.method, tuned.adapt.prefix_tokens) == ("prefix", 128)
    full = read(tmp_path, chatglm3(None, gradient_accumulation_steps=16), ranks=4).config
    assert (full.adapt.method, full.train.step_samples) == ("full", 4 * 16 * 4)


@pytest.mark.parametrize(
    "stock",
    [glm4(), glm4() | {"peft_config": LORA | {"target_modules": ["q_proj"]}}, chatglm3(LORA), chatglm3(None)],
)
def test_every_key_is_spoken_for(tmp_path: Path, stock: dict[str, Any]) -> None:
    notes = read(tmp_path, stock).notes
    noted = {note.key for note in notes}
    assert keys(stock) <= noted
    assert all(note.ours or note.why for note in notes)


def test_what_the_file_leaves_out_is_as_the_stock_trainer_has_it(tmp_path: Path) -> None:
    stock = {"data_config": {"train_file": "t.jsonl"}, "max_input_length": 1, "max_output_length": 63}
    config = read(tmp_path, stock | {"training_args": {"output_dir": "o"}}).config
    assert (config.train.steps, config.train.epochs, config.train.step_samples) == (None, 3.0, 8)
    assert (config.optim.learning_rate, config.train.seed, config.data.dev) == (5e-5, 42, None)
    peft = {"peft_config": {"peft_type": "LORA"}}
    adapt = read(tmp_path, stock | peft).config.adapt
    assert (adapt.rank, adapt.alpha, adapt.dropout) == (8, 8.0, 0.0)


def test_the_optimizer_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    args = {
        "optim": "adafactor",
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "warmup_steps": 20,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "seed": 7,
    }
    config = read(tmp_path, glm4(**args)).config
    assert config.optim.model_dump(exclude={"decay", "floor", "learning_rate"}) == {
        "name": "adafactor",
        "betas": (0.9, 0.95),
        "epsilon": 1e-6,
        "schedule": "cosine",
        "warmup": 20.0,
        "clip": 0.5,
        "weight_decay": 0.1,
    }
    assert config.train.seed == 7
    assert read(tmp_path, glm4(warmup_ratio=0.1, warmup_steps=0)).config.optim.warmup == 0.1
    assert read(tmp_path, glm4(lr_scheduler_type="constant", warmup_steps=5)).config.optim.warmup == 0.0


def test_how_long_and_how_often(tmp_path: Path) -> None:
    by_epochs = read(tmp_path, glm4(max_steps=-1, num_train_epochs=2)).config.train
    assert (by_epochs.steps, by_epochs.epochs) == (None, 2.0)
    assert read(tmp_path, glm4(num_train_epochs=2)).config.train.steps == 3000
    assert read(tmp_path, glm4(save_steps=0.1)).config.checkpoint.every == 300
    assert (
        read(tmp_path, glm4(save_strategy="epoch", eval_strategy="epoch")).config.checkpoint.every == "auto"
    )
    assert read(tmp_path, glm4(eval_strategy="no")).config.data.dev is None
    assert "a share of a run" in complaint(tmp_path, glm4(save_steps=0.1, max_steps=-1))


@pytest.mark.parametrize(("stage", "shard"), [(0, "off"), (1, "auto"), (2, "auto"), (3, "full")])
def test_zero_stages(tmp_path: Path, stage: int, shard: str) -> None:
    zero = {
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 1.0,
    }
    reading = read(tmp_path, glm4(deepspeed=zero))
    assert reading.config.parallel.shard == shard
    why = next(note.why for note in reading.notes if note.key == "training_args.deepspeed")
    assert f"stage {stage}" in why
    assert "memory.offload" in why


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"gradient_clipping": 0.3}, "`gradient_clipping` is 0.3, but the YAML says 1.0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, "`lr` is 1.0, but the YAML says 0.0005"),
        ({"optimizer": {"type": "Lamb"}}, "`optimizer` is not AdamW"),
        ({"scheduler": {"type": "WarmupLR"}}, "`scheduler` is not understood"),
        ({"zero_optimization": {"stage": 4}}, "`zero_optimization.stage` is 4"),
        ({"zero_optimization": {"stage": [2]}}, "`zero_optimization.stage` is [2]"),
        ({"zero_optimization": [2]}, "`zero_optimization.stage` is [2]"),
        ({"optimizer": {"type": "AdamW", "params": None}}, "`optimizer.params` is no section"),
        ("nothere.json", "there is no file nothere.json"),
        (5, "DeepSpeed settings are a path or a section"),
    ],
)
def test_deepspeed_settings_that_would_change_the_result_are_refused(
    tmp_path: Path, zero: object, expected: str
) -> None:
    assert expected in complaint(tmp_path, glm4(deepspeed=zero))


def test_a_broken_deepspeed_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n"zero_optimization": {,}}')
    assert complaint(tmp_path, glm4(deepspeed="ds.json")).startswith("ds.json:2: not JSON: ")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"learning_rte": 1}, "`training_args.learning_rte` is not understood (did you mean"),
        ({"frobnicate": 1}, "`training_args.frobnicate` is not understood"),
        (
            {"label_smoothing_factor": 0.1},
            "`training_args.label_smoothing_factor` is 0.1, which is not offered",
        ),
        ({"neftune_noise_alpha": 5}, "`training_args.neftune_noise_alpha` is not understood"),
        ({"optim": "lion"}, "`training_args.optim` is lion, which is not offered"),
        ({"lr_scheduler_type": "polynomial"}, "`training_args.lr_scheduler_type` is polynomial"),
        ({"per_device_train_batch_size": 0}, "`training_args.per_device_train_batch_size` is 0"),
        ({"report_to": "wandb"}, "`training_args.report_to` names wandb"),
        ({"fsdp": "shard_grad_op"}, "`training_args.fsdp` is shard_grad_op"),
        ({"warmup_steps": "many"}, "`training_args.warmup_steps` is many, expected a number"),
        ({"learning_rate": "fast"}, '`optim.learning_rate` is "fast", expected a number'),
    ],
)
def test_what_is_not_offered_is_refused_by_name(tmp_path: Path, args: dict[str, Any], expected: str) -> None:
    message = complaint(tmp_path, glm4(**args))
    assert expected in message
    assert message.startswith("stock.yaml:")
    line = int(message.split(":")[1])
    assert next(iter(args)) in (tmp_path / "stock.yaml").read_text().splitlines()[line - 1]


@pytest.mark.parametrize(
    ("peft", "expected"),
    [
        ({"peft_type": "IA3"}, "`peft_config.peft_type` is IA3"),
        (LORA | {"use_dora": True}, "`peft_config.use_dora` is True, which is not offered"),
        (LORA | {"target_modules": ".*proj"}, "is the pattern"),
        ({"peft_type": "PREFIX_TUNING"}, "`peft_config.num_virtual_tokens` is 0"),
    ],
)
def test_adapters_that_are_not_offered_are_refused(
    tmp_path: Path, peft: dict[str, Any], expected: str
) -> None:
    assert expected in complaint(tmp_path, chatglm3(peft))


def test_data_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    stock = glm4()
    assert "`data_config.train_file` is missing" in complaint(tmp_path, stock | {"data_config": {}})
    for key in ("max_input_length", "max_output_length"):
        assert f"`{key}` is missing" in complaint(tmp_path, stock | {key: None})
        assert f"`{key}` is 0, expected a whole" in complaint(tmp_path, stock | {key: 0})


def test_the_reading_is_a_config_like_any_other(tmp_path: Path) -> None:
    from glm_accelerate.config.load import load_config

    config = read(tmp_path, glm4() | {"peft_config": LORA}).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_the_scripts_own_key_for_swanlab(tmp_path: Path) -> None:
    def sinks(value: str, **args: Any) -> list[str]:
        return list(read(tmp_path, {**glm4(**args), "swanlab": value}).config.observe.sinks)

    assert sinks("local") == sinks("cloud") == ["swanlab"]
    assert sinks("local", report_to="none") == ["swanlab"]
    assert sinks("cloud", report_to=["tensorboard", "swanlab"]) == ["tensorboard", "swanlab"]
    assert sinks("disabled") == []
    assert "`swanlab` is offline (there are local, cloud, disabled)" in complaint(
        tmp_path, {**glm4(), "swanlab": "offline"}
    )
