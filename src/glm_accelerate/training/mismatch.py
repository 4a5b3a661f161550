"""What a checkpoint was made with against what there is now: a table of differences and their consequences.

Some differences make a resume meaningless, some have to be accepted by name, some only cost the last bit.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from glm_accelerate.runtime.errors import UserError

Verdict = Literal["never", "ask", "warn"]

# Each fingerprint: may a resume go on when it differs, and what that would mean.
SUBJECTS: dict[str, tuple[Verdict, str]] = {
    "model": ("never", "the trained weights belong to another base"),
    "data": ("never", "the position in the data means other samples"),
    "tokenizer": ("never", "the same text is other tokens"),
    "template": ("never", "conversations are written in another way"),
    "adapt": ("never", "other tensors are trained, or they mean something else"),
    "optimizer": ("never", "the moments do not fit"),
    "order": ("ask", "the samples from here on are others: some come twice, some never"),
    "schedule": ("ask", "the learning rate jumps, or the run ends at another step"),
    "updates": ("ask", "the moments go on under other settings"),
    "dropout": ("ask", "the adapter goes on with another share dropped"),
    "precision": ("ask", "sums round differently from here on"),
    "ranks": ("warn", "the same samples in the same steps"),
    "passes": ("warn", "the same samples in other rows"),
    "device": ("warn", "the same steps"),
    "versions": ("warn", "the same steps"),
    "threads": ("warn", "the same steps"),
}
ACCEPTABLE = frozenset(name for name, (verdict, _) in SUBJECTS.items() if verdict == "ask")
OTHER = "config"  # keys of a config from which no fingerprint follows
EVERY = ACCEPTABLE | {OTHER}  # what --accept takes, and --accept-changes accepts

# Under which name a changed key of the config is accepted.
COVERED_BY = {
    "order": "train.seed train.step_samples train.step_tokens data.batching",
    "schedule": "train.steps train.epochs "
    "optim.learning_rate optim.schedule optim.warmup optim.decay optim.floor",
    "updates": "optim.betas optim.epsilon optim.weight_decay optim.clip",
    "dropout": "adapt.dropout",
    "precision": "model.dtype adapt.base precision.compute precision.loss_scale precision.raise_after",
}

NEW_RUN = "--run DIR and --init-from for a new run on these weights"
FROM_SCHEMA_1 = ("data", "tokenizer", "template")  # what is still compared with how it was recorded then


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference. `flag` accepts it; where it is None, `fatal` says whether that ends it."""

    name: str
    then: str
    now: str
    consequence: str
    flag: str | None
    fatal: bool


class Mismatched(UserError):
    """The run cannot go on from this checkpoint, or only if the user accepts the differences."""

    def __init__(self, mismatches: list[Mismatch], where: object) -> None:
        self.mismatches = mismatches
        names = ", ".join(mismatch.name for mismatch in mismatches)
        verb = "is" if len(mismatches) == 1 else "are"
        flags = " ".join(mismatch.flag for mismatch in mismatches if mismatch.flag)
        hopeless = any(mismatch.flag is None for mismatch in mismatches)
        what = f"the {names} {verb} not what this checkpoint was made with"
        super().__init__(what, where=where, cure=NEW_RUN if hopeless else f"{flags} to go on, or {NEW_RUN}")


def compare(then: Mapping[str, str], now: Mapping[str, str]) -> list[Mismatch]:
    """Every difference, the gravest first."""
    old = "environment" in then  # schema 1 recorded less
    names = FROM_SCHEMA_1 if old else tuple(SUBJECTS)
    mismatches: list[Mismatch] = []
    for name in names:
        before = then.get(name, "not recorded")
        if before == now[name] or (old and now[name].endswith(before)):  # the bare hash
            continue
        verdict, consequence = SUBJECTS[name]
        flag = f"--accept {name}" if verdict == "ask" else None
        mismatches.append(Mismatch(name, before, now[name], consequence, flag, verdict != "warn"))
    return mismatches


def check(
    then: Mapping[str, str], now: Mapping[str, str], where: object, accept: Collection[str] = ()
) -> list[str]:
    """Warnings about what differs. Raises `Mismatched` with all that was not accepted."""
    found = compare(then, now)
    refused = [mismatch for mismatch in found if mismatch.fatal and mismatch.name not in accept]
    if refused:
        raise Mismatched(refused, where)
    warnings = [
        f"{m.name} was {m.then}, now {m.now}: {m.consequence}; no longer bit-identical" for m in found
    ]
    if "environment" in then:
        warnings.append(
            "written by version 0.1, which recorded less: only data, tokenizer and template were compared"
        )
    return warnings


def accepted_as(key: str) -> str:
    """The name under which a changed key of the config is accepted."""
    return next((name for name, keys in COVERED_BY.items() if key in keys.split()), OTHER)
