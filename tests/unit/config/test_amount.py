from pathlib import Path

import pytest

from glm_accelerate.config.amount import read_amount
from glm_accelerate.config.load import load_config, to_yaml
from glm_accelerate.runtime.errors import UserError

LEAST = "model: {path: m}\ndata: {train: a.jsonl}\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 << 30),
        ("12GB", 12 * 10**9),
        ("12gb", 12 * 10**9),
        (" 1.5 GiB ", 3 << 29),
        ("512MiB", 512 << 20),
        ("12", None),
        ("12G", None),
        ("-1GiB", None),
        ("1e3GiB", None),
        ("RTX 3060 12GB", None),
        ("١٢GiB", None),
        ("", None),
    ],
)
def test_amounts_are_read(text: str, size: int | None) -> None:
    assert read_amount(text) == size


def test_a_limit_is_kept_as_it_was_said(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(LEAST)
    config = load_config(path, ["memory.limit=12GiB", "memory.offload=[optimizer]"])
    assert (config.memory.limit, config.memory.offload) == ("12GiB", ["optimizer"])
    path.write_text(to_yaml(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("memory.limit=12", "`memory.limit` is 12, expected auto or an amount such as 12GiB"),
        ("memory.limit=much", '`memory.limit` is "much", expected auto or an amount such as 12GiB'),
        ("memory.limit=0GiB", '`memory.limit` is "0GiB", expected auto or an amount such as 12GiB'),
        ("memory.offload=optimizer", '`memory.offload` is "optimizer", expected auto, off or a list'),
        (
            "memory.offload=[moments]",
            "`memory.offload` is ['moments'], expected one of auto, off, activations, optimizer or weights",
        ),
    ],
)
def test_what_is_no_amount_is_told(tmp_path: Path, word: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(LEAST)
    with pytest.raises(UserError) as caught:
        load_config(path, [word])
    assert str(caught.value) == f"command line: {said}"
