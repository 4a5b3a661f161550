"""From LLaMA-Factory's files to a model that transformers opens, by the commands that the how-to names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

SHAPES: dict[str, dict[str, Any]] = {
    "lora": {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"},
    "full": {"finetuning_type": "full", "deepspeed": "examples/deepspeed/ds_z3_config.json"},
    "qlora": {"finetuning_type": "lora", "lora_rank": 4, "quantization_bit": 4, "quantization_method": "bnb"},
}
ZERO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": False},
}


def glm(*words: object, cwd: Path) -> str:
    command = [sys.executable, "-m", "glm_accelerate.cli.main", *map(str, words)]
    answer = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=140, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stderr


@pytest.mark.process
@pytest.mark.parametrize("shape", SHAPES)
def test_from_their_files_to_an_exported_model(shape: str, tiny_run: dict[str, Any], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text("utf-8").splitlines()]
    rows = [{"q": line["messages"][0]["content"], "a": line["messages"][1]["content"]} for line in lines]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    info = {"mine": {"file_name": "mine.json", "columns": {"prompt": "q", "response": "a"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    folder = tmp_path / "examples/deepspeed"
    folder.mkdir(parents=True)
    (folder / "ds_z3_config.json").write_text(json.dumps(ZERO))
    yaml = {
        "model_name_or_path": tiny_run["model"]["path"],
        "trust_remote_code": True,
        "stage": "sft",
        "do_train": True,
        **SHAPES[shape],
        "dataset": "mine",
        "template": "glm4",
        "cutoff_len": 128,
        "max_samples": 20,
        "output_dir": "saves",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1.0e-3,
        "max_steps": 4,
        "bf16": True,
        "report_to": "none",
    }
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in yaml.items())
    (tmp_path / "theirs.yaml").write_text(text)
    said = glm(
        *(
            "train",
            "--llamafactory-config",
            "theirs.yaml",
            f"data.cache={tmp_path / 'cache'}",
            "data.workers=1",
        ),
        *("--run", "run"),
        cwd=tmp_path,
    )
    assert ("max_tokens=128" in said and "twice the rank" in said) or shape == "full"
    glm("export", "run", "exported", cwd=tmp_path)
    model = cast(Any, AutoModelForCausalLM).from_pretrained(tmp_path / "exported")
    before = cast(Any, AutoModelForCausalLM).from_pretrained(tiny_run["model"]["path"])
    tokens = torch.arange(12)[None]
    assert not torch.equal(model(tokens).logits, before(tokens).logits)
