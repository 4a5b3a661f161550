"""The proofs of a model: that it has every token, trains what it should, and keeps documents apart."""

from collections import Counter

import torch

from glm_accelerate.config.schema import AdaptSection, RunConfig
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.models.adapt import choose_layers, count
from glm_accelerate.models.bind import bound
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.linear import linear_layers, projection_of
from glm_accelerate.models.sizes import structure_in_words
from glm_accelerate.prove.proof import Proof

LENGTHS = (13, 24, 9)  # of the documents that are kept apart


def prove_model(config: RunConfig, model: Decoder, tokenizer: Tokenizer) -> list[Proof]:
    """The proofs of a model that is bound, as a run will use it."""
    return [
        prove_vocabulary(model, tokenizer),
        prove_coverage(model, config.adapt),
        prove_isolation(model),
        *([] if model.sizes.plain else [Proof("structure", True, structure_in_words(model.sizes))]),
        *(Proof(choice.operator, True, f"{choice.path}: {choice.why}") for choice in bound(model)),
    ]


def prove_vocabulary(model: Decoder, tokenizer: Tokenizer) -> Proof:
    """A token beyond the table of embeddings ends a GPU's whole context, without a word about why."""
    numbers, rows = tokenizer.vocab_size, model.sizes.vocabulary
    fits = "" if numbers <= rows else ": the tokenizer files are not this model's"
    return Proof("vocabulary", numbers <= rows, f"{numbers:,} tokens, {rows:,} embeddings{fits}")


def prove_coverage(model: Decoder, section: AdaptSection) -> Proof:
    """What was asked to train does train: counts, for each kind of linear layer, how many of them do."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = count(model)
    here = "" if model.stage is None else " of this stage"
    share = f"{trained:,} of {total:,} weights{here} train ({trained / total:.2%})"
    if section.method == "prefix":
        return Proof("adapters", model.prefix is not None and trained > 0, f"a prefix: {share}")
    every = Counter(_kind(name) for name, _ in linear_layers(model))
    bound = Counter(
        _kind(name)
        for name, layer in linear_layers(model)
        if any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
    )
    if section.method == "lora":
        asked = Counter(_kind(name) for name, _ in choose_layers(model, section.targets))
    elif section.method == "full":
        asked = every
    else:
        first = (len(model.layers) if model.stage is None else model.stage.layers) - section.layers
        asked = Counter(_kind(name) for name, _ in linear_layers(model) if int(name.split(".")[1]) >= first)
    counts = ", ".join(f"{kind} {bound[kind]}/{every[kind]}" for kind in sorted(every))
    return Proof("adapters", bound == asked and (trained > 0 or not asked), f"{share}; {counts}")


def _kind(name: str) -> str:
    return projection_of(name).rpartition(".")[2]


def prove_isolation(model: Decoder) -> Proof:
    """Packed documents cannot see each other: compares, bit for bit, the activations of two rows that differ
    in every token of the first document only.
    """
    device = model.embed.device
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, model.sizes.vocabulary, (1, sum(LENGTHS)), generator=generator)
    other = row.clone()
    other[:, : LENGTHS[0]] = (other[:, : LENGTHS[0]] + 1) % model.sizes.vocabulary
    layout = Layout.of_documents([LENGTHS], device)
    training = model.training
    model.eval()
    with torch.no_grad():
        first, second = (model.hidden(tokens.to(device), layout)[0].float() for tokens in (row, other))
    model.train(training)
    if not (first.isfinite().all() and second.isfinite().all()):
        return Proof("isolation", False, "activations are not finite: the model's weights are damaged")
    apart = (first[LENGTHS[0] :] - second[LENGTHS[0] :]).abs().max().item()
    moved = (first[: LENGTHS[0]] - second[: LENGTHS[0]]).abs().max().item()
    finding = f"its own activations moved by {moved:.2g}, its neighbours' by {apart:.2g}"
    return Proof("isolation", apart == 0.0 and moved > 0.0, f"one document replaced: {finding}")
