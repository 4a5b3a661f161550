"""Proof that packed documents cannot see each other: change one, and the others' activations stay."""

import torch

from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.prove.proof import Proof

LENGTHS = (13, 24, 9)


def prove_isolation(model: Decoder) -> Proof:
    """Compares, bit for bit, two rows that differ in every token of the first document only."""
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
    said = f"one document replaced: its own activations moved by {moved:.2g}, its neighbours' by {apart:.2g}"
    return Proof("isolation", apart == 0.0 and moved > 0.0, said)
