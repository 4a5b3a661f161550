"""What a part found, one JSON line each, on disk at once: a run that is cut leaves what it had."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """`ok` is None where there is nothing to pass; figures then hold why, if nothing was measured."""

    part: str
    ok: bool | None
    figures: dict[str, Any]


@dataclass(frozen=True)
class Log:
    """A file of findings, and the screen."""

    path: Path

    def add(self, finding: Finding) -> None:
        line = json.dumps(asdict(finding))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def read(self) -> Sequence[Finding]:
        if not self.path.exists():
            return []
        return [Finding(**json.loads(line)) for line in self.path.read_text().splitlines()]
