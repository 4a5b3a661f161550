"""One rank of DeepSpeed's ZeRO-3, on transformers' model: the outside way through the same steps.

Started by `deepspeed_oracle`. It shares with ours the files and which samples make up step k. They are dealt
in turn, padded to one batch, and go through another model, other sharding and other clipping.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from glm_accelerate.config.load import load_config
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.data.types import IGNORED
from glm_accelerate.plan.resolve import order_of


def padded(inputs: Inputs, numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and labels (of the position itself) of some samples, one a row."""
    samples = [inputs.train[number] for number in numbers]
    shape = (len(samples), max(map(len, samples)))
    tokens, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, sample in enumerate(samples):
        end = len(sample)
        tokens[row, :end] = torch.from_numpy(sample.tokens.astype("int64"))
        labels[row, :end] = tokens[row, :end].where(torch.from_numpy(sample.targets.copy()), IGNORED)
        mask[row, :end] = 1
    return tokens, mask, labels


def main(config_file: Path, out: Path, settings: list[str], faster: float) -> None:
    config = load_config(config_file, settings)
    optim, steps, model_dir = config.optim, config.train.steps, Path(config.model.path)
    assert steps is not None
    assert (optim.name, optim.schedule, optim.warmup) == ("adamw", "constant", 0.0)
    deepspeed.init_distributed("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.learning_rate * faster, betas=optim.betas, eps=optim.epsilon)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": optim.clip,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    engine.train()
    inputs = open_inputs(config.data, model_dir)
    said: list[tuple[float, float]] = []
    for number, _, drawn in order_of(inputs, config, config.train.step_samples).steps_from(0):
        if number > steps:
            break
        numbers = [int(sample) for sample in drawn]
        targets = sum(int(inputs.train[sample].targets[1:].sum()) for sample in numbers)
        tokens, mask, labels = padded(inputs, numbers[rank::ranks])
        logits = engine(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        loss = cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        engine.backward(loss * ranks / targets)  # it averages over ranks
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        said.append((float(total) / targets, float(engine.get_global_grad_norm())))
    if rank == 0:
        out.write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:], float(sys.argv[3]))
