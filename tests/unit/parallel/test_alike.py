"""What differs between ranks, told by all of them; two ranks are two threads here, which meet in a file."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import FileStore

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.parallel import alike
from glm_accelerate.parallel.alike import differences, facts_of, model_digest, require_alike, require_shared
from glm_accelerate.parallel.ranks import Ranks


@pytest.fixture
def both(tmp_path: Path) -> Callable[[Callable[[Ranks], None]], list[BaseException | None]]:
    """both(act): what each of two ranks raises in `act(ranks)`."""

    def do(act: Callable[[Ranks], None]) -> list[BaseException | None]:
        stores = [FileStore(str(tmp_path / "meeting"), -1) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            acts = [pool.submit(act, Ranks(rank, 2, store)) for rank, store in enumerate(stores)]
            return [one.exception(timeout=60) for one in acts]

    return do


def test_ranks_that_differ_are_told_on_all(
    both: Callable[..., list[BaseException | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_ACCELERATE_NODE", "here")
    facts = [{"torch": "2.13.0", "data": "1"}, {"torch": "2.12.0", "data": "1"}]
    told = both(lambda ranks: require_alike(ranks, facts[ranks.rank]))
    said = "rank 1 on here differs from rank 0 on here: torch 2.12.0, not 2.13.0"
    assert [str(one) for one in told] == [f"{said} ({alike.CURE})"] * 2
    assert both(lambda ranks: require_alike(ranks, facts[0])) == [None, None]


def test_a_directory_that_is_not_shared_is_told_on_all(
    both: Callable[..., list[BaseException | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the other one has no such file, or one of its own."""
    monkeypatch.setattr(alike, "SEEN", 0.1)
    monkeypatch.setenv("GLM_ACCELERATE_NODE", "there")
    files = [tmp_path / name / "lock" for name in ("shared", "own")]
    for file in files:
        file.parent.mkdir()
    files[0].write_text("process 1")
    for content in (None, "process 2"):
        if content is not None:
            files[1].write_text(content)
        told = both(lambda ranks: require_shared(ranks, files[ranks.rank]))
        assert all("node there does not see what rank 0 wrote there" in str(one) for one in told)
    assert both(lambda ranks: require_shared(ranks, files[0])) == [None, None]


def test_a_config_is_compared_key_by_key() -> None:
    said = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    ours = facts_of(RunConfig.model_validate(said))
    theirs = facts_of(RunConfig.model_validate(said | {"optim": {"learning_rate": 0.5}}))
    assert differences(theirs, ours).startswith("optim.learning_rate 0.5, not ")
    assert {"torch", "glm-accelerate"} <= ours.keys()
    assert differences(ours, ours) == ""
    many = differences({}, {str(number): "x" for number in range(5)})
    assert many == "0 none, not x; 1 none, not x; 2 none, not x; and 2 more"


def test_a_models_files_have_a_digest(make_model: Callable[..., Path]) -> None:
    model = make_model("glm4")
    before = model_digest(model)
    assert model_digest(model) == before
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert model_digest(model) != before
