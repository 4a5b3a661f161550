"""The race against the peers as people read it: what each side reached, and ours by each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.race.figures import First, Peak, Speed, Useful
from benchmarks.race.job import Method, Result
from benchmarks.report import Origin, named, number, page, table

PEERS = {"trl": "TRL", "llamafactory": "LLaMA-Factory", "swift": "ms-swift", "axolotl": "Axolotl"}
NAMES = {"ours": "ours", **PEERS}

ABOUT = """\
Each peer trains through its own documented entry point in an environment of its own, with the settings that
were fastest of those that its documentation advises: `benchmarks/race/peers/README.md` says which were tried.

**Equal**: the weights at the start, the set of samples, the rate and its schedule (linear, no warm-up), AdamW
without decay, clipping at 1, bf16 compute, LoRA of rank 8, alpha 32 and dropout 0.1 on q, k, v, steps,
threads; nothing saved or evaluated meanwhile. Transformers judges, in fp32, what each exported.

**Not equal**: TRL, LLaMA-Factory and Axolotl pack rows of 1,024 tokens from all samples, one row a step,
about four samples; ms-swift packs with FlashAttention only, so it pads steps of four samples, which it picks
by length; ours packs four samples a step. So steps hold other samples, and speed is in the tokens that each
trained. Templates and labels are each peer's own (the table has targets a step); of a conversation that is
too long ours drops the oldest turns, they its end. Adapters start from other random numbers. In full
fine-tuning ours, TRL and LLaMA-Factory keep weights in fp32, ms-swift and Axolotl in bf16. Our operators
in C++ are compiled before, as they are once a machine (about ten seconds).
"""


@dataclass(frozen=True)
class Run:
    """One training of one side, what the judge said, and how busy the machine was before it."""

    result: Result
    loss: float
    load: float


@dataclass(frozen=True)
class Race:
    """All repeats so far of every side that is there."""

    method: Method
    batch: int
    warmup: int
    loss_before: float
    parameters: int
    weights: int  # bytes of the model's file
    absent: Sequence[str]
    runs: dict[str, list[Run]]


@dataclass(frozen=True)
class Row:
    """One line of the report. `compared`: whether ours by a peer's says something."""

    name: str
    of: Callable[[Run], float]
    compared: bool = False


def rows(race: Race) -> list[Row]:
    def result(name: str, figure: Callable[[Result], float], compared: bool = False) -> Row:
        return Row(name, lambda run: figure(run.result), compared)

    def per_step(name: str, counts: Callable[[Result], list[int]]) -> Row:
        return Row(name, lambda run: sum(counts(run.result)) / len(counts(run.result)))

    return [
        result("speed by wall clock, tokens/s", Speed("wall_seconds", race.warmup), compared=True),
        result("speed by processor time, tokens/s", Speed("cpu_seconds", race.warmup), compared=True),
        result("first step, s", First()),
        result("peak memory, MB", Peak(above=0), compared=True),
        result("peak memory above libraries and weights, MB", Peak(above=race.weights), compared=True),
        result("positions that hold a token, %", Useful()),
        per_step("tokens a step", lambda result: result.tokens),
        per_step("targets a step", lambda result: result.targets),
        Row("held-out loss", lambda run: run.loss),
    ]


def reached(race: Race) -> str:
    return table(
        ("", *(NAMES[side] for side in race.runs)),
        (
            (row.name, *(number(median(row.of(run) for run in runs)) for runs in race.runs.values()))
            for row in rows(race)
        ),
    )


def ratios(race: Race) -> str:
    """Ours by each peer: median over the repeats, and the smallest and the largest."""
    peers = [side for side in race.runs if side != "ours"]

    def cell(row: Row, peer: str) -> str:
        each = [row.of(a) / row.of(b) for a, b in zip(race.runs["ours"], race.runs[peer], strict=True)]
        return f"**{median(each):.2f}** ({min(each):.2f} to {max(each):.2f})"

    compared = ((row.name, *(cell(row, peer) for peer in peers)) for row in rows(race) if row.compared)
    return table(("ours /", *(NAMES[peer] for peer in peers)), compared, left=range(len(peers) + 1))


def markdown(source: Origin, race: Race) -> str:
    loads = [run.load for runs in race.runs.values() for run in runs]
    steps = len(race.runs["ours"][0].result.tokens)
    absent = ", ".join(NAMES[peer] for peer in race.absent)
    facts = [
        f"load before each run {min(loads):.1f} to {max(loads):.1f}",
        *(f"{NAMES[side]}: {named(runs[0].result.versions)}" for side, runs in race.runs.items()),
        f"GLM-4 0414, {race.parameters / 1e6:.1f} M parameters, random weights; at most 1,024 tokens",
        *([f"left out, no environment given: {absent}"] if absent else []),
    ]
    return page(
        f"Race: ours against the peers on a CPU, {race.method}",
        source,
        facts,
        ABOUT,
        f"{len(race.runs['ours'])} runs a side in turn, each in a fresh process, {steps} steps of about",
        f"{race.batch} samples; the first {race.warmup} steps are left out of the speeds. Medians.",
        f"Held-out loss before training: {race.loss_before:.4f}.\n",
        reached(race),
        "\nRatios are taken between the runs of one repeat: their median, and smallest to largest.\n",
        ratios(race),
    )
