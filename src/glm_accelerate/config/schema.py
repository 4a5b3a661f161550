"""The keys of a config and every default: one frozen model a section, one docstring a field.

Nothing below the command line reads a file or an environment variable for a setting; each part receives its
own section or plain arguments. Values that follow from these are computed in `plan/resolve`.
"""

from difflib import get_close_matches
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from glm_accelerate.config.sources import HeldOut, Sources
from glm_accelerate.runtime.words import read_amount

Auto = Literal["auto"]
DtypeName = Literal["float32", "bfloat16", "float16"]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Frozen and strict; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelSection(Section):
    """Which model is trained."""

    path: str
    """A directory in Hugging Face form, or a name on Hugging Face or ModelScope (`modelscope:NAME`)."""
    dtype: DtypeName = "bfloat16"
    """How frozen weights are kept. Full fine-tuning trains float32 master weights in any case."""


COMPRESSED = {"share_qk": 1, "keep_energy": 1.0}  # former keys and their defaults


class AdaptSection(Section):
    """Which of its weights train, and how."""

    method: Literal["lora", "full", "freeze", "prefix"] = "lora"
    """lora: small matrices beside linear layers; full: all; freeze: the last layers; prefix: P-tuning v2."""
    rank: int = Field(default=8, ge=1)
    """LoRA: rank of the added matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """LoRA: the added product is scaled by alpha / rank."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """LoRA: dropout on the adapter's input; prefix: on the prefix."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """LoRA: which linear layers, by the last part of their name. A name that matches nothing is an error."""
    base: Auto | DtypeName | Literal["nf4", "int8", "fp8"] = "auto"
    """How the frozen base is kept; auto: as `model.dtype`; nf4, int8, fp8: its linear layers in few bits."""
    layers: int = Field(default=2, ge=1)
    """freeze: how many of the last layers train."""
    prefix_tokens: int = Field(default=128, ge=1)
    """prefix: how many virtual tokens stand before each document."""

    @model_validator(mode="after")
    def _packed_is_frozen(self) -> Self:
        if self.base in ("nf4", "int8", "fp8") and self.method in ("full", "freeze"):
            raise ValueError(f"base {self.base} cannot be trained: say method lora or prefix")
        return self

    @model_validator(mode="before")
    @classmethod
    def _compressed_before(cls, values: object) -> object:
        """Refuse former keys, which `compress` replaces; older runs have them at their defaults."""
        if not isinstance(values, dict):
            return values
        asked = {key: values[key] for key, plain in COMPRESSED.items() if values.get(key, plain) != plain}
        if asked:
            options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in asked.items())
            raise ValueError(
                f"{' and '.join(asked)} went to a verb: `glm-accelerate compress MODEL NEW {options}`, then "
                "train model.path=NEW. A run begun with such keys goes on, and is exported, only with the "
                "commit that began it; what that exports with --layout structured is such a NEW"
            )
        return {key: value for key, value in values.items() if key not in COMPRESSED}


class DataSection(Section):
    """What it is trained on."""

    train: Sources = Field(min_length=1)
    """A data file, or a list of files, each with an optional weight: JSON lines, CSV, Parquet, ..."""
    dev: HeldOut | None = None
    """Held-out data: files, or a share (2%) or number of samples of `train`; without, no evaluation."""
    format: Literal["auto", "messages", "conversations", "alpaca", "sharegpt", "text"] = "auto"
    """The form of a line; auto: seen from its keys."""
    template: Auto | Literal["chatglm2", "chatglm3", "glm4", "glm4-0414"] = "auto"
    """How a conversation is written for the model; auto: as its own tokenizer files say."""
    train_on: Literal["all", "last"] = "all"
    """Learn every assistant turn, or only the last."""
    labels: Literal["exact", "stock"] = "exact"
    """exact: all that the model has to produce; stock: as the stock script labels, to compare."""
    max_tokens: int = Field(default=2048, ge=16, le=2**24)
    """No sample is longer than this."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """A longer one: shorten its prompt and keep the answer, leave it out, or stop."""
    batching: Literal["pack", "bucket", "pad"] = "pack"
    """pack: whole documents side by side in one row; bucket: neighbours in length; pad: the stock way."""
    skip_bad: int = Field(default=0, ge=0)
    """How many lines a file may have that cannot be read, or written by the template: more are an error."""
    workers: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Processes that tokenize; auto: one a core, at most 16."""
    cache: Auto | str = "auto"
    """Where tokenized data is kept; auto: in the user's cache directory."""


class TrainSection(Section):
    """For how long."""

    steps: int | None = Field(default=None, ge=1, le=10**9)
    """Optimizer updates; or say `epochs`."""
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    """Passes over the data; the default is one."""
    step_samples: int | None = Field(default=None, ge=1)
    """Samples in one optimizer update, over all devices; the default is 16. Or say `step_tokens`."""
    step_tokens: int | None = Field(default=None, ge=1)
    """Tokens in one optimizer update, over all devices."""
    micro_tokens: Auto | Annotated[int, Field(ge=64)] = "auto"
    """Tokens in one forward pass; auto: what the plan finds."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the order of the samples, new weights and dropout."""
    max_bad_steps: int = Field(default=10, ge=1)
    """Stop after so many steps in a row whose gradients are not finite."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("say steps or epochs, not both")
        if self.step_samples is not None and self.step_tokens is not None:
            raise ValueError("say step_samples or step_tokens, not both")
        return self


class PrecisionSection(Section):
    """In which number formats it computes."""

    compute: Auto | Literal["float32", "bfloat16", "float16", "fp8"] = "auto"
    """Products and activations (sums, norms, loss: float32; fp8: only products); auto: bfloat16 if fast."""
    loss_scale: float = Field(default=65536.0, ge=1)
    """float16: by what the loss is first multiplied; halved at each overflow, never below 1."""
    raise_after: int = Field(default=1000, ge=1)
    """float16: the loss scale is doubled after so many steps without overflow."""
    compile: Auto | Literal["off", "on"] = "auto"
    """Operators between products as one loop each; auto: where that is measured and the run repays it."""


class OptimSection(Section):
    """How the weights are updated."""

    name: Literal["adamw", "adamw8bit", "adafactor"] = "adamw"
    """adamw: two float32 moments a weight; adamw8bit: in 8 bits; adafactor: rows and columns only."""
    learning_rate: float = Field(default=5e-4, gt=0, le=100)
    """The highest rate of the schedule."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; norms and biases never decay."""
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.999), strict=False)
    """adamw: decay of the two moments."""
    epsilon: float = Field(default=1e-8, gt=0)
    """adamw: added to the root of the second moment."""
    schedule: Literal["linear", "cosine", "wsd", "constant"] = "cosine"
    """The rate after warm-up; wsd: constant, then a linear fall over the last `decay` of the run."""
    warmup: float = Field(default=0.03, ge=0)
    """Linear rise at the start: a share of the run if below 1, else steps."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """wsd: share of the run in which the rate falls."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """The rate at the end, as a share of the highest."""
    clip: float = Field(default=1.0, ge=0)
    """Largest norm of all gradients together; 0 never clips."""


def _amount(value: object) -> object:
    """The text itself, which is what a run directory keeps, if it is an amount above nothing."""
    if not isinstance(value, str) or not read_amount(value):
        raise PydanticCustomError("amount", "an amount such as 12GiB")
    return value


class MemorySection(Section):
    """How memory is saved."""

    recompute: Auto | Literal["off", "blocks"] = "auto"
    """blocks: keep only each block's input and compute the rest again in the backward pass; auto: the plan
    recomputes only if the run would not fit."""
    offload: Auto | Literal["off"] | list[Literal["activations", "optimizer", "weights"]] = "auto"
    """What waits in host memory until it is needed; auto: nothing, the plan says where it would help."""
    limit: Auto | Annotated[str, BeforeValidator(_amount)] = "auto"
    """How much memory of each device may be used, as 12GiB; auto: all that is free."""
    fuse_update: Auto | Literal["off", "on"] = "auto"
    """Each weight is updated as soon as its gradient is there, which is then freed."""


class ParallelSection(Section):
    """Over how many devices."""

    shard: Auto | Literal["off", "full"] | Annotated[int, Field(ge=1)] = "auto"
    """How many ranks share one copy of weights and moments. off: each has its own; full: all share one."""
    zero: Literal[1, 2, 3] = 3
    """What these ranks divide between the passes of a step: 1 moments, 2 gradients too, 3 weights too."""
    tensor: Auto | Annotated[int, Field(ge=1)] = 1
    """How many ranks share every matrix product: each has some heads, some of each MLP, some words; auto, as
    with the next two: as the plan finds the step the fastest, `shard` and passes with it.
    """
    pipeline: Auto | Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=1)]] = 1
    """How many stages the layers are divided into, or how many layers each has (at first, if `balance` is
    measured): [18, 22]; what one stage has computed travels to the next."""
    context: Auto | Annotated[int, Field(ge=1)] = 1
    """How many ranks share a document that is longer than a pass; others stay whole on one of them."""
    balance: Literal["tokens", "cost", "measured"] = "cost"
    """How a step is dealt to ranks: equally many tokens; equal cost, as reckoned from lengths; measured: by
    what lengths cost here, less to slower ranks, measured again at each checkpoint, as are stages."""

    @property
    def open(self) -> list[str]:
        """The axes whose sizes the plan chooses."""
        return [axis for axis in ("tensor", "pipeline", "context") if getattr(self, axis) == "auto"]

    def size(self, axis: str) -> int:
        """Of an axis; 1 as long as it is not chosen."""
        size = 1 if axis in self.open else getattr(self, axis)
        return len(size) if isinstance(size, list) else size

    @property
    def stages(self) -> tuple[int, ...]:
        """How many layers each has, if that is said."""
        return tuple(self.pipeline) if isinstance(self.pipeline, list) else ()


class CheckpointSection(Section):
    """How often the run is saved, and what is kept."""

    every: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Steps between checkpoints; auto: as often as pays. One is always written at the end."""
    wait: bool = False
    """Training waits until each is written; else the state is copied once and written meanwhile."""
    between_failures: Auto | Annotated[float, Field(gt=0)] = "auto"
    """Seconds between failures of the machines; auto: learnt from the run itself."""
    overhead: float = Field(default=0.01, gt=0, lt=1)
    """Share of time that saves may take while failures are only guessed."""
    longest_loss: float = Field(default=1800.0, gt=0)
    """Seconds of work that a failure may cost."""
    keep_last: int = Field(default=3, ge=1)
    """How many of the newest stay."""
    keep_best: int = Field(default=1, ge=0)
    """How many with the lowest held-out loss stay, too."""
    keep_every_steps: Annotated[int, Field(ge=1)] | None = None
    """One of every so many steps stays, too."""
    keep_every_hours: Annotated[float, Field(gt=0)] | None = None
    """One of every so many hours stays, too."""
    thin: bool = False
    """Older ones stay, too, about one for each doubling of age."""
    codec: Auto | Literal["none", "zstd"] = "auto"
    """zstd: about a quarter smaller, slower to write on few cores; auto: files as any tool reads them."""


METRICS = ("loss", "exact_match", "bleu", "rouge")


def _known_metrics(names: list[str]) -> list[str]:
    for name in names:
        if name not in METRICS and ".py:" not in name:
            nearest = get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
            raise ValueError(f"no metric {name}: {nearest}? ({', '.join(METRICS)}, or FILE.py:FUNCTION)")
    return names


def _share(value: object) -> object:
    """A percentage as a share."""
    number = value.removesuffix("%").strip() if isinstance(value, str) and value.endswith("%") else ""
    try:
        return float(number) / 100 if number else value
    except ValueError:
        return value


class EvaluateSection(Section):
    """How progress is judged."""

    every: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Steps between evaluations; auto: a tenth of the run, at most 500."""
    where: Auto | Literal["beside", "inline", "external"] = "auto"
    """beside: a process of its own, on a spare device or spare cores; inline: training waits; external: who
    runs `evaluate RUN --follow`; auto: beside where something is spare and keeps up, else inline."""
    budget: (
        Annotated[float, Field(gt=0, le=0.5), BeforeValidator(_share, json_schema_input_type=float | str)]
        | None
    ) = None
    """Share of the machines' time that evaluation may take, as 3%: it sets how often and on how many samples,
    by what evaluations take. `every` is then the shortest interval, and `samples` the most."""
    samples: Auto | Literal["all"] | Annotated[int, Field(ge=2)] = "auto"
    """Held-out samples a time, the same ones at each; auto: as many as tell this step from the best one."""
    metrics: Annotated[list[str], Field(min_length=1), AfterValidator(_known_metrics)] = ["loss"]
    """loss; of greedy answers exact_match, bleu, rouge, or your own function as FILE.py:FUNCTION."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer."""
    precision: Auto | Literal["float32", "bfloat16"] = "auto"
    """beside: what the evaluator computes in; auto: as training does."""
    keep: Literal["latest", "all"] = "latest"
    """latest: an evaluation that still waits when the next is requested is skipped, and the log says so."""
    timeout: Auto | Annotated[float, Field(gt=0)] = "auto"
    """Seconds that one evaluation may take; auto: ten times the usual, at least ten minutes."""
    patience: float = Field(default=600.0, ge=0)
    """Seconds that the end of a run waits for evaluations that are still to come."""
    margin: float = Field(default=0.002, ge=0)
    """Losses closer than this are as good as equal."""
    lag: Auto | Annotated[int, Field(ge=1)] = "auto"
    """A result decides so many steps after its own, never earlier; auto: as many as lie between two."""
    stop_after: Annotated[int, Field(ge=1)] | None = None
    """Stop after so many evaluations in a row that were no gain."""
    lower_rate_after: Annotated[int, Field(ge=1)] | None = None
    """Lower the learning rate after so many evaluations in a row that were no gain."""
    lower_rate_by: float = Field(default=0.5, gt=0, lt=1)
    """By this factor."""

    @model_validator(mode="after")
    def _decides_by_loss(self) -> Self:
        if self.decides and "loss" not in self.metrics:
            raise ValueError("stop_after and lower_rate_after go by the loss: say metrics [loss, ...]")
        return self

    @model_validator(mode="after")
    def _pays_for_its_own(self) -> Self:
        if self.budget is not None and self.where == "external":
            raise ValueError("budget is of the run's own machines: say where auto, beside or inline")
        return self

    @property
    def decides(self) -> bool:
        """Whether results can change what is trained."""
        return self.stop_after is not None or self.lower_rate_after is not None


class ProveSection(Section):
    """What is proven before the first step."""

    template: Literal["refuse", "warn"] = "refuse"
    """Where the model's own chat template differs from ours: refuse to train, or warn and train on ours."""


class ObserveSection(Section):
    """Where else events go."""

    sinks: list[Literal["tensorboard", "swanlab"]] = []
    """Where events go besides events.jsonl and the console."""
    notify: list[str] = []
    """Who is told of the end, a failure, warnings and silence: addresses of Feishu, DingTalk, WeCom or any
    webhook, or env:NAME of a variable that holds one."""


class RunConfig(Section):
    """One run, as the user wrote it. Never changed after parsing."""

    model: ModelSection
    """Which model is trained."""
    adapt: AdaptSection = AdaptSection()
    """Which of its weights train, and how."""
    data: DataSection
    """What it is trained on."""
    train: TrainSection = TrainSection()
    """For how long."""
    precision: PrecisionSection = PrecisionSection()
    """In which number formats it computes."""
    optim: OptimSection = OptimSection()
    """How the weights are updated."""
    memory: MemorySection = MemorySection()
    """How memory is saved."""
    parallel: ParallelSection = ParallelSection()
    """Over how many devices."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is kept."""
    evaluate: EvaluateSection = EvaluateSection()
    """How progress is judged."""
    prove: ProveSection = ProveSection()
    """What is proven before the first step."""
    observe: ObserveSection = ObserveSection()
    """Where else events go."""

    @model_validator(mode="after")
    def _decides_on_something(self) -> Self:
        if self.evaluate.decides and self.data.dev is None:
            raise ValueError("evaluate.stop_after and lower_rate_after need held-out data: say data.dev")
        return self
