"""All the data of a run, ready to be drawn: template, tokenizer, training and held-out samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from glm_accelerate.config.schema import DataSection
from glm_accelerate.config.sources import Source
from glm_accelerate.data.held_out import hold_out, spoken
from glm_accelerate.data.measure import shared
from glm_accelerate.data.prepare import prepare
from glm_accelerate.data.store import Store
from glm_accelerate.data.templates import Template, detect_template, get_template
from glm_accelerate.data.tokenizers import Tokenizer, load_tokenizer
from glm_accelerate.data.workers import EncodeSettings
from glm_accelerate.runtime import env
from glm_accelerate.runtime.files import close_folder

MOST_WORKERS = 16  # more gain nothing: one process appends their results

Progress = Callable[[str, int, int], None]  # what is read, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Inputs:
    """The data section of a config, opened with a model directory."""

    template: Template
    tokenizer: Tokenizer
    train: Store
    dev: Store | None
    held_out: str = ""  # how `dev` was taken from the training data

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.tokenizer.special(name) for name in self.template.stops)

    @property
    def damages(self) -> list[str]:
        """Damage that was found and repaired by preparing again, for a warning."""
        return [*self.train.damages, *(self.dev.damages if self.dev else ())]

    @property
    def warnings(self) -> list[str]:
        """What a run says at its start: damage, and held-out samples that are trained on."""
        both = [] if self.dev is None or self.held_out else shared(self.train, self.dev)
        if not both:
            return self.damages
        share = f"{len(both):,} of {len(self.dev or ()):,} samples of data.dev"
        return [*self.damages, f"{share} are in data.train, too: their loss flatters (`data` lists them)"]


def open_inputs(
    section: DataSection, model_dir: Path, progress: Progress | None = None, *, check: bool = True
) -> Inputs:
    """Prepare what is not cached and open it. `check`: read cached files whole to detect damage."""
    name = detect_template(model_dir) if section.template == "auto" else section.template
    settings = EncodeSettings(
        format=section.format,
        template=name,
        train_on=section.train_on,
        labels=section.labels,
        max_tokens=section.max_tokens,
        overlong=section.overlong,
        skip_bad=section.skip_bad,
    )
    cache = env.cache_root() / "data" if section.cache == "auto" else env.expanded(section.cache)
    if section.cache == "auto":
        close_folder(cache)
    workers = min(env.cores(), MOST_WORKERS) if section.workers == "auto" else section.workers

    def open_store(what: str, sources: Sequence[Source]) -> Store:
        watch = partial(progress, what) if progress else None
        return prepare(
            sources, settings, model_dir, cache=cache, workers=workers, progress=watch, check=check
        )

    train, dev, how = open_store("train", section.train), None, ""
    if isinstance(section.dev, list):
        dev = open_store("dev", section.dev)
    elif section.dev is not None:
        train, dev, copies = hold_out(train, section.dev)
        of = " samples" if isinstance(section.dev, int) else ""
        how = f"{spoken(section.dev)}{of} of data.train, by content"
        how += f"; {copies:,} more with the same content left out" if copies else ""
    return Inputs(get_template(name), load_tokenizer(model_dir, name), train, dev, how)


def open_held_out(section: DataSection, model_dir: Path) -> Inputs:
    """With the held-out samples alone to speak of: the training data need not be here if they are files."""
    if isinstance(section.dev, list):
        section = section.model_copy(update={"train": section.dev, "dev": None})
        opened = open_inputs(section, model_dir)
        return replace(opened, dev=opened.train)
    return open_inputs(section, model_dir)
