"""The neutral judge: mean loss per target on held-out samples, in fp32, one sample at a time, no packing.

python -m benchmarks.race.judge MODEL EXPORT HELDOUT OUT

Whatever a side exported is opened with transformers (and peft where it is an adapter), so neither side
judges itself. EXPORT may be MODEL: then this is the loss before training.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.race.samples import Tokens, read_samples


def open_export(model: Path, export: Path) -> Any:
    if not (export / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(export))


@torch.inference_mode()
def heldout_loss(model: Any, samples: list[Tokens]) -> float:
    total, count = 0.0, 0
    for sample in samples:
        tokens_1T = torch.from_numpy(sample.tokens).long()[None]
        labels_T = torch.from_numpy(sample.labels)
        logits_TV = model(input_ids=tokens_1T, use_cache=False).logits[0]
        total += F.cross_entropy(logits_TV[:-1], labels_T[1:], ignore_index=-100, reduction="sum").item()
        count += int((labels_T[1:] != -100).sum())
    return total / count


def main(model: Path, export: Path, heldout: Path, out: Path) -> None:
    loss = heldout_loss(open_export(model, export).eval(), read_samples(heldout))
    out.write_text(json.dumps({"loss": loss}) + "\n")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:5]))
