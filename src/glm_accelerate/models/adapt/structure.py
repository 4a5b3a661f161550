"""A model's structure: what of it is shared and factored, as data. With it a model is given the places for
weights that a checkpoint or a directory holds, without computing the surgery again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

from glm_accelerate.models.adapt.lowrank import empty, factor, factors, multiply_out, replace
from glm_accelerate.models.adapt.sharing import share_qk, sharing, unshare
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import Linear
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from glm_accelerate.config.schema import AdaptSection

MODEL_TYPE = "glm-accelerate"  # of a directory that holds such a model as it is: no other program opens it
INNER = ".inner.weight"


@dataclass(frozen=True, slots=True)
class Structure:
    """`ranks`: of each factored layer, by name. Layers in a group of `share_qk` share q_proj and k_proj."""

    share_qk: int
    ranks: Mapping[str, int]

    @property
    def plain(self) -> bool:
        """A GLM as it was published."""
        return self.share_qk == 1 and not self.ranks

    def __str__(self) -> str:
        said = [f"each {self.share_qk} layers share queries and keys"] if self.share_qk > 1 else []
        if self.ranks:
            lowest, highest = min(self.ranks.values()), max(self.ranks.values())
            said.append(f"{len(self.ranks)} matrices factored at ranks {lowest} to {highest}")
        return ", ".join(said) or "plain"


def structure_of(model: Decoder) -> Structure:
    """What a model has become."""
    return Structure(sharing(model), {name: layer.rank for name, layer in factors(model).items()})


def restructure(
    model: Decoder, section: "AdaptSection", shapes: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Share and factor as `section` says, in place. `shapes`: of trained tensors that are about to be put in:
    then places for them are made, and nothing is computed.
    """
    now = structure_of(model)
    if not now.plain and section.method != "full":
        raise UserError(
            f"adapt.method is {section.method}: a model that shares or factors matrices only trains whole",
            cure="adapt.method=full, or export it expanded first and train that",
        )
    if not section.restructures:
        return
    if not now.plain:
        raise UserError(
            "the model shares or factors matrices already", cure="leave out adapt.share_qk and keep_energy"
        )
    if section.share_qk > len(model.layers):
        raise UserError(f"adapt.share_qk is {section.share_qk}, the model has {len(model.layers)} layers")
    if shapes is not None:
        ranks = {name.removesuffix(INNER): shape[0] for name, shape in shapes.items() if name.endswith(INNER)}
        carve(model, Structure(section.share_qk, ranks))
        return
    if model.embed.is_meta:
        raise UserError(
            "adapt.share_qk and keep_energy begin on a model's weights, not within a stock run",
            cure="a new run with --init-from and what stock exported",
        )
    if section.share_qk > 1:
        share_qk(model, section.share_qk)
    if section.keep_energy < 1:
        factor(model, section.keep_energy)


def carve(model: Decoder, structure: Structure) -> None:
    """Make the places of a structure, in place; its factors are to be filled."""
    if structure.share_qk > 1:
        share_qk(model, structure.share_qk)
    left = dict(structure.ranks)

    def place(name: str, layer: nn.Module) -> nn.Module | None:
        return empty(layer, left.pop(name)) if name in left and isinstance(layer, Linear) else None

    replace(model, place)
    if left:
        raise UserError(f"no layer is called {next(iter(left))!r}, which is said to be factored")


def expand(model: Decoder) -> None:
    """A plain GLM again, frozen, with the same logits within rounding, in place."""
    model.requires_grad_(False)
    multiply_out(model)
    unshare(model)


def describe(structure: Structure, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a directory that holds a model as it is."""
    return {"model_type": MODEL_TYPE, "structure": asdict(structure), "model": dict(config)}


def described(config: dict[str, Any], where: object) -> tuple[dict[str, Any], Structure]:
    """What `describe` was given; of any other model its own config.json, and that it is plain."""
    if config.get("model_type") != MODEL_TYPE:
        return config, Structure(1, {})
    inside, said = config.get("model"), config.get("structure")
    if isinstance(inside, dict) and isinstance(said, dict):
        share, ranks = said.get("share_qk"), said.get("ranks")
        if _size(share) and isinstance(ranks, dict) and all(map(_size, ranks.values())):
            return inside, Structure(share, ranks)
    raise UserError("does not say how the model is structured", where=where, cure="export it again")


def _size(said: object) -> TypeGuard[int]:
    return type(said) is int and said > 0
