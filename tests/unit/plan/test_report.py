import io

from rich.console import Console

from glm_accelerate.plan.report import show_plan
from glm_accelerate.plan.run_plan import Reason


def test_every_value_stands_beside_its_reason() -> None:
    out = io.StringIO()
    reasons = (Reason("steps", "300", "the config"), Reason("data [bold]", "[red]x", "counted"))
    show_plan(reasons, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["what", "steps", "data"]
    assert lines[1].split(maxsplit=2)[1:] == ["300", "the config"]
    assert "[bold]" in lines[2]
    assert "[red]x" in lines[2]
