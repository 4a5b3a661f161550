"""Every learnt answer ends with a learnt stop token.

Without that label a model never learns to stop, and nothing in the loss shows it.
"""

from collections.abc import Sequence

import numpy as np

from glm_accelerate.data.encode import Labels, Left, TrainOn, encode
from glm_accelerate.data.templates.template import ASSISTANT, Template
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.data.types import Conversation
from glm_accelerate.prove.proof import Proof

_NO_LIMIT = 1 << 40  # whole conversations: a truncated answer rightly has no stop


def prove_labels(
    conversations: Sequence[Conversation],
    template: Template,
    tokenizer: Tokenizer,
    *,
    train_on: TrainOn = "all",
    labels: Labels = "exact",
) -> Proof:
    """Looks at the end of each run of targets."""
    enders = [tokenizer.special(name) for name in template.stops]
    if "<|user|>" in template.stops:  # roles: a thought may be followed by the next turn of its own
        enders.append(tokenizer.special(ASSISTANT))
    encoded = encode(
        conversations, template, tokenizer, train_on=train_on, labels=labels, max_tokens=_NO_LIMIT
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
        said = f"{share} learn an answer without its stop token, first {open_ended[0]}"
        return Proof("labels", False, said)
    return Proof("labels", True, f"{answers} answers in {len(encoded)} samples end with a learnt stop token")
