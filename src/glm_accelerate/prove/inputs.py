"""The proofs of a run's inputs: that the template is the model's own, and that answers end."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from glm_accelerate.config.schema import DataSection, RunConfig
from glm_accelerate.data.encode import Labels, Left, TrainOn, encode, render
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.data.read import read
from glm_accelerate.data.templates.template import ASSISTANT, Template
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.data.types import Conversation
from glm_accelerate.prove.proof import Proof
from glm_accelerate.prove.template import prove_template
from glm_accelerate.runtime.errors import UserError

CONVERSATIONS = 32  # enough to meet every role; more take longer than they tell
CHARACTERS, MESSAGES = 10_000, 500  # of a conversation's messages; so do longer ones
NO_LIMIT = 1 << 40  # whole conversations: a truncated answer rightly has no stop


def prove_inputs(config: RunConfig, inputs: Inputs, model_dir: Path) -> list[Proof]:
    """Template and labels, on the first conversations of the first training file."""
    path, data = inputs.train.parts[0].path, config.data
    columns, tags = (tuple(names.items()) for names in (data.train[0].columns, data.train[0].tags))
    lines = read(path, data.format, data.skip_bad, columns, tags)
    first = [_beginning(one) for one in islice(lines, CONVERSATIONS)]
    spoken = [one for one in first if one.text is None and _is_rendered(one, inputs.template, data)]
    if not spoken:
        return [Proof("template", True, "plain text: nothing is rendered")]
    template, tokenizer = inputs.template, inputs.tokenizer
    proven = prove_template(model_dir, template, tokenizer, spoken)
    proofs = [replace(proven, binding=config.prove.template == "refuse")]
    if data.labels == "exact":
        proofs.append(prove_labels(spoken, template, tokenizer, train_on=data.train_on))
    return proofs


def _beginning(conversation: Conversation) -> Conversation:
    """As much of a very long one as shows its template."""
    messages = conversation.messages[:MESSAGES]
    cut = tuple(replace(message, content=message.content[:CHARACTERS]) for message in messages)
    return replace(conversation, messages=cut)


def _is_rendered(conversation: Conversation, template: Template, data: DataSection) -> bool:
    """One that the template cannot write was a bad line when data was prepared, and was reported then."""
    try:
        render(conversation, template, data.train_on, data.labels)
    except UserError:
        return False
    return True


def prove_labels(
    conversations: Sequence[Conversation],
    template: Template,
    tokenizer: Tokenizer,
    *,
    train_on: TrainOn = "all",
    labels: Labels = "exact",
) -> Proof:
    """Every learnt answer ends with a learnt stop token: without that label a model never learns to stop, and
    nothing in the loss shows it.
    """
    enders = [tokenizer.special(name) for name in template.stops]
    if "<|user|>" in template.stops:  # roles: a thought may be followed by the next turn of its own
        enders.append(tokenizer.special(ASSISTANT))
    encoded = encode(
        conversations, template, tokenizer, train_on=train_on, labels=labels, max_tokens=NO_LIMIT
    )
    answers, open_ended = 0, list[str]()
    for sample in encoded:
        if isinstance(sample, Left):
            continue
        learnt = sample.targets
        last = np.flatnonzero(learnt & ~np.append(learnt[1:], np.False_))
        answers += len(last)
        if not np.isin(sample.tokens[last], enders).all():
            open_ended.append(str(sample.place))
    if not answers:
        return Proof("labels", False, f"none of {len(conversations)} conversations has anything to learn")
    if open_ended:
        share = f"{len(open_ended)} of {len(encoded)} samples"
        finding = f"{share} learn an answer without its stop token, first {open_ended[0]}"
        return Proof("labels", False, finding)
    return Proof("labels", True, f"{answers} answers in {len(encoded)} samples end with a learnt stop token")
