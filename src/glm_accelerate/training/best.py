"""The file `best` of a run: which of its published weights its evaluations found best."""

from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint.find import BEST, best_of
from glm_accelerate.checkpoint.format import place
from glm_accelerate.runtime.files import write_text


@dataclass(slots=True)
class BestWeights:
    """`awaited`: the best step, until weights of it are published. Inline its checkpoint may follow later."""

    run: Path
    awaited: int | None = None

    def name(self, step: int | None) -> None:
        """Write the name of this step's weights; None: no step is the best. Until there are weights of it,
        those that were named before stay.
        """
        paths = [] if step is None else [place(self.run, kind, step) for kind in ("snapshot", "checkpoint")]
        published = next((path for path in paths if path.is_dir()), None)
        self.awaited = step if published is None else None
        if published is not None:
            write_text(self.run / BEST, f"{published.relative_to(self.run).as_posix()}\n")
        elif step is None or best_of(self.run) is None:
            self.clear()

    def clear(self) -> None:
        (self.run / BEST).unlink(missing_ok=True)
