"""The proofs that every start runs, in seconds, and a short report of them."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from glm_accelerate.config.schema import DataSection, RunConfig
from glm_accelerate.data.encode import render
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.data.read import read
from glm_accelerate.data.templates import Template
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.data.types import Conversation
from glm_accelerate.models.bind import bound
from glm_accelerate.models.compression import said_of
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.prove.coverage import prove_coverage
from glm_accelerate.prove.isolation import prove_isolation
from glm_accelerate.prove.labels import prove_labels
from glm_accelerate.prove.proof import Proof
from glm_accelerate.prove.template import prove_template
from glm_accelerate.runtime.errors import UserError

CONVERSATIONS = 32  # enough to meet every role; more take longer than they tell
CHARACTERS, MESSAGES = 10_000, 500  # of a conversation's messages; so do longer ones


def prove_inputs(config: RunConfig, inputs: Inputs, model_dir: Path) -> list[Proof]:
    """Template and labels, on the first conversations of the first training file."""
    source, data = config.data.train[0].path, config.data
    first = [_beginning(one) for one in islice(read(Path(source), data.format, data.skip_bad), CONVERSATIONS)]
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
    """Of a very long one as much as a template can be seen from."""
    messages = conversation.messages[:MESSAGES]
    cut = tuple(replace(message, content=message.content[:CHARACTERS]) for message in messages)
    return replace(conversation, messages=cut)


def _is_rendered(conversation: Conversation, template: Template, data: DataSection) -> bool:
    """One that the template cannot write was a bad line when data was prepared, and has been told."""
    try:
        render(conversation, template, data.train_on, data.labels)
    except UserError:
        return False
    return True


def prove_model(config: RunConfig, model: Decoder, tokenizer: Tokenizer) -> list[Proof]:
    """Of what a run has built; bound, as it will be used."""
    paths = bound(model)
    return [
        prove_vocabulary(model, tokenizer),
        prove_coverage(model, config.adapt),
        prove_isolation(model),
        *([] if model.sizes.plain else [Proof("structure", True, said_of(model.sizes))]),
        *(Proof(choice.operator, True, f"{choice.path}: {choice.why}") for choice in paths),
    ]


def prove_vocabulary(model: Decoder, tokenizer: Tokenizer) -> Proof:
    """A token beyond the table of embeddings ends a GPU's whole context, without a word about why."""
    numbers, rows = tokenizer.vocab_size, model.sizes.vocabulary
    fits = "" if numbers <= rows else ": the tokenizer files are not this model's"
    return Proof("vocabulary", numbers <= rows, f"{numbers:,} tokens, {rows:,} embeddings{fits}")


def require(proofs: list[Proof]) -> None:
    """A run does not start where a binding proof failed."""
    for proof in proofs:
        if not proof.ok and proof.binding:
            raise UserError(f"the proof of {proof.name} failed: {proof.said}", cure=proof.cure or None)
