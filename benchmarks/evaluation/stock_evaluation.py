"""The stock way: our own re-statement of how GLM-4's fine-tune script evaluates, on the HF Trainer.

python -m benchmarks.evaluation.stock_evaluation JOB RESULT

As there: bf16 weights; greedy generation in batches that are padded on the left to their longest; then, on
the rank, one text after the other: decoded with special tokens and padding, cut by jieba, scored by nltk and
rouge_chinese. Prompts as shipped (the answer in them) or, with `combine` off, without it.
"""

import time

BEGAN = time.perf_counter()

# ruff: noqa: E402
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from benchmarks.child import read, write
from benchmarks.evaluation.job import Answer, Job, Result, holds
from benchmarks.evaluation.prompts import Question, honest, leaking
from benchmarks.evaluation.stock_metrics import means, ready, scores_of

STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")


@dataclass
class Clock:
    """Seconds of the two parts, and the scores of each text."""

    generation: float = 0.0
    metrics: float = 0.0
    answers: list[str] = field(default_factory=list[str])
    references: list[str] = field(default_factory=list[str])
    scores: list[dict[str, float]] = field(default_factory=list[dict[str, float]])


class Collator(DataCollatorForSeq2Seq):
    """References are padded on the right, prompts on the left to the longest of the batch."""

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> Any:
        longest = max(len(feature["output_ids"]) for feature in features)
        pad = self.tokenizer.pad_token_id
        padded = [
            {**feature, "output_ids": feature["output_ids"] + [pad] * (longest - len(feature["output_ids"]))}
            for feature in features
        ]
        batch = super().__call__(padded, return_tensors)
        batch.pop("labels")  # None, for which today's trainer would compute a loss, and fail
        return batch


class Trainer(Seq2SeqTrainer):
    """Keeps what was generated after the prompt, and the references."""

    clock: Clock

    def prediction_step(self, model: Any, inputs: Any, *words: Any, **more: Any) -> Any:
        began = time.perf_counter()
        references: Tensor = inputs.pop("output_ids")
        width = inputs["input_ids"].shape[1]
        with torch.no_grad():
            loss, tokens, _ = super().prediction_step(model, inputs, *words, **more)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # as there; it waits for the device, too
        self.clock.generation += time.perf_counter() - began
        return loss, tokens[:, width:], references


def compute_metrics(output: Any, tokenizer: Any, clock: Clock) -> dict[str, float]:
    """One text after the other, special tokens and padding and all."""
    began = time.perf_counter()
    predictions, references = (np.where(ids == -100, tokenizer.pad_token_id, ids) for ids in output)
    for answer_ids, reference_ids in zip(predictions, references, strict=True):
        clock.answers.append(tokenizer.decode(answer_ids).strip())
        clock.references.append(tokenizer.decode(reference_ids).strip())
        clock.scores.append(scores_of(clock.references[-1], clock.answers[-1]))
    clock.metrics += time.perf_counter() - began
    return means(clock.scores)


def questions(job: Job, tokenizer: Any) -> list[Question]:
    """Of each conversation the one that asks for its last answer; `combine` off would ask for all."""
    names = ["<|user|>", "<|assistant|>", "[gMASK]", "<sop>"]
    stop, assistant, *opening = tokenizer.convert_tokens_to_ids(names)
    asked: list[Question] = []
    for line in Path(job.data).read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        if job.prompts == "shipped":
            asked += leaking(written(tokenizer, messages), assistant, stop)
        else:
            turns = [written(tokenizer, [message])[2:] for message in messages]
            roles = [message["role"] for message in messages]
            asked += honest(turns, roles, opening, stop)[-1:]
    return asked


def written(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def until_stop(tokens: Sequence[int], stops: Sequence[int]) -> list[int]:
    """The tokens before the first one that ends an answer."""
    ended = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:ended])


def arguments(job: Job, generation: GenerationConfig, out: Path) -> Seq2SeqTrainingArguments:
    return Seq2SeqTrainingArguments(
        output_dir=str(out),
        per_device_eval_batch_size=job.batch,
        predict_with_generate=True,
        generation_config=generation,
        remove_unused_columns=False,
        dataloader_num_workers=0,  # shipped: 16; samples are in memory already, so workers only cost
        report_to="none",
        disable_tqdm=True,
        use_cpu=job.device == "cpu",
    )


def main(job_file: Path, result_file: Path) -> None:
    job = read(job_file, Job)
    torch.set_num_threads(job.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    dtype = getattr(torch, job.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, use_cache=False, dtype=dtype)
    stops = tokenizer.convert_tokens_to_ids(list(STOPS))
    generation = GenerationConfig(
        max_new_tokens=job.max_new_tokens, pad_token_id=stops[0], eos_token_id=stops, use_cache=True
    )
    asked = questions(job, tokenizer)
    clock = Clock()
    trainer = Trainer(
        model=model,
        args=arguments(job, generation, result_file.parent / "trainer"),
        data_collator=Collator(tokenizer=tokenizer, padding="longest", return_tensors="pt"),
        compute_metrics=lambda output: compute_metrics(output, tokenizer, clock),
    )
    trainer.clock = clock
    ready()
    began = time.perf_counter()
    output = trainer.predict([{"input_ids": q.prompt, "output_ids": q.reference} for q in asked])  # pyright: ignore[reportArgumentType]
    ended = time.perf_counter()
    generated = [until_stop(ids, [*stops, -100]) for ids in np.asarray(output.predictions).tolist()]
    answers = [
        Answer(
            prompt=tokenizer.decode(question.prompt),
            reference=tokenizer.decode(until_stop(question.reference, stops)).strip(),
            answer=tokenizer.decode(ids).strip(),
            right=clock.references[number],
            said=clock.answers[number],
            scores=clock.scores[number],
        )
        for number, (question, ids) in enumerate(zip(asked, generated, strict=True))
    ]
    result = Result(
        side=f"stock, {job.prompts} prompts",
        whole=ended - began,
        generation=clock.generation,
        metrics=clock.metrics,
        process=ended - BEGAN,
        tokens=sum(map(len, generated)),
        shown=sum(holds(question.prompt, until_stop(question.reference, stops)) for question in asked),
        figures=means(clock.scores),
        answers=answers,
        versions={module.__name__: module.__version__ for module in (torch, transformers)},
    )
    write(result_file, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
