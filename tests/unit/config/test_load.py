import json
from pathlib import Path

import pytest

from glm_accelerate.config.load import json_schema, load_config, override, preset_names, to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.runtime.errors import UserError

LEAST = "model: {path: m}\ndata: {train: a.jsonl}\n"
SCHEMA = Path(__file__).parents[3] / "src/glm_accelerate/config/schema.json"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def complaint(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_the_least_config_has_all_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, LEAST)
    assert config.data.train[0].path == "a.jsonl"
    assert config == RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "a.jsonl"}})


def test_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        LEAST + "optim: {clip: 2.0, learning_rate: 1e-5}\n",
        "optim.clip=0.5",
        "optim.betas=[0.9, 0.95]",
        "data.train=[b.jsonl, {path: c.jsonl, weight: 2}]",
        "adapt.targets=[q_proj]",
    )
    assert (config.optim.clip, config.optim.learning_rate, config.optim.betas) == (0.5, 1e-5, (0.9, 0.95))
    assert [(source.path, source.weight) for source in config.data.train] == [("b.jsonl", 1), ("c.jsonl", 2)]
    assert config.adapt.targets == ["q_proj"]


def test_a_length_on_the_command_line_replaces_the_other_kind_in_the_file(tmp_path: Path) -> None:
    config = load(
        tmp_path, LEAST + "train: {epochs: 3, step_samples: 4}\n", "train.steps=5", "train.step_tokens=99"
    )
    assert (config.train.steps, config.train.epochs) == (5, None)
    assert (config.train.step_tokens, config.train.step_samples) == (99, None)


def test_an_empty_section_changes_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, LEAST + "evaluate:\n# every: 5\n") == load(tmp_path, LEAST)
    assert load(tmp_path, LEAST + "evaluate:\n", "evaluate.every=5").evaluate.every == 5


@pytest.mark.parametrize(
    ("text", "what", "cure"),
    [
        ("optim: {lr: 1e-5}", "`optim` has no key `lr`", "did you mean `learning_rate`?"),
        ("optim: {learning_rte: 1}", "`optim` has no key `learning_rte`", "did you mean `learning_rate`?"),
        ("train: {clip: 1}", "`train` has no key `clip`", "`clip` belongs under `optim`"),
        ("train: {schedul: 1}", "`train` has no key `schedul`", "did you mean `optim.schedule`?"),
        ("train: {batch_size: 1}", "`train` has no key `batch_size`", "did you mean `step_samples`?"),
        ("train: {qqq: 1}", "`train` has no key `qqq`", "it has steps, epochs, step_samples, step_tokens, "
         "micro_tokens, seed, max_bad_steps"),
        ("learning_rate: 1", "there is no section `learning_rate`", "`learning_rate` belongs under `optim`"),
        ("lora_rank: 1", "there is no section `lora_rank`", "did you mean `adapt.rank`?"),
        ("trian: {steps: 1}", "there is no section `trian`", "did you mean `train`?"),
        ("optim: {clip: '1e-5'}", '`optim.clip` is "1e-5", expected a number', "remove the quotes: 1e-5"),
        ("train: {steps: 1_0}", '`train.steps` is "1_0", expected a whole number', "write 10"),
        ("optim: {learning_rate: 1_0.5e-5}", '`optim.learning_rate` is "1_0.5e-5", expected a number',
         "write 10.5e-5"),
        ("train: {steps: 1e3}", "`train.steps` is 1000.0, expected a whole number", "write 1000"),
        ("train: {micro_tokens: 10}", "`train.micro_tokens` is 10, expected auto or at least 64", None),
        ("train: {steps: 1, epochs: 1}", "`train`: say steps or epochs, not both", "remove one"),
        ("evaluate: {metrics: [blue]}", "`evaluate.metrics`: no metric blue: bleu? (loss, exact_match, "
         "bleu, rouge, or FILE.py:FUNCTION)", None),
        ("train: {seed: yes}", '`train.seed` is "yes", expected a whole number', None),
        ("optim: {betas: [0.9]}", "`optim.betas` is [0.9], expected one more item", None),
        ("optim: {betas: [0.9, 1.0]}", "`optim.betas.1` is 1.0, expected less than 1", None),
        ("optim: {betas: [-0.5, 0.9]}", "`optim.betas.0` is -0.5, expected at least 0", None),
        ("train: {seed: -1}", "`train.seed` is -1, expected at least 0", None),
        ("adapt: {targets: []}", "`adapt.targets` is [], expected all-linear or at least this many items: 1",
         None),
        ("evaluate: {samples: 1}", "`evaluate.samples` is 1, expected auto, all or at least 2", None),
        ("checkpoint: {codec: gz}", '`checkpoint.codec` is "gz", expected one of auto, none or zstd', None),
        ("train: 3", "`train` is 3, expected a section of keys", None),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line_and_cure(
    tmp_path: Path, text: str, what: str, cure: str | None
) -> None:
    remedy = f" ({cure})" if cure else ""
    assert complaint(tmp_path, LEAST + text) == f"c.yaml:3: {what}{remedy}"


def test_what_sections_say_together_is_a_mistake_of_the_file(tmp_path: Path) -> None:
    said = "c.yaml: evaluate.stop_after and lower_rate_after need held-out data: say data.dev"
    assert complaint(tmp_path, LEAST + "evaluate: {stop_after: 2}") == said


def test_the_first_of_several_mistakes_is_named_and_the_others_counted(tmp_path: Path) -> None:
    text = LEAST + "train:\n  seed: 1\n  stps: 4\noptim:\n  clip: -1\n  lr: 1\n"
    assert complaint(tmp_path, text).startswith(
        "c.yaml:5: `train` has no key `stps`; 2 more mistakes after this"
    )


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert (
        complaint(tmp_path, "model: {path: m}") == "c.yaml: the section `data` is missing (say `data: {...}`)"
    )
    text = "model: {dtype: bfloat16}\ndata: {train: a}"
    assert complaint(tmp_path, text) == "c.yaml:1: the key `model.path` is missing (say `model.path=...`)"
    assert "`model` is missing; 1 more mistake" in complaint(tmp_path, "")


def test_a_source_that_is_no_file_is_named_as_such(tmp_path: Path) -> None:
    for wrong in ("5", "[{path: a, weight: 0}]", "[{path: a, weight: 1e9}]"):
        assert "a file or a list of files" in complaint(
            tmp_path, f"model: {{path: m}}\ndata: {{train: {wrong}}}"
        )
    message = complaint(tmp_path, "model: {path: m}\ndata: {train: [{pth: a}]}")
    assert message.startswith("c.yaml:2: `data.train.0` has no key `pth`") or "`data.train.0.path`" in message


@pytest.mark.parametrize("word", ["steps", "train.steps", "train=1", "a.b.c=1", "=1", ".x=1", "train.=1"])
def test_an_override_has_one_form(tmp_path: Path, word: str) -> None:
    assert complaint(tmp_path, LEAST, word) == f"command line: `{word}` is not `section.key=value`"


def test_a_mistake_on_the_command_line_is_placed_there(tmp_path: Path) -> None:
    assert complaint(tmp_path, LEAST, "train.stps=1").startswith("command line: `train` has no key `stps`")
    assert complaint(tmp_path, LEAST, "train.steps=1", "train.epochs=1").startswith(
        "command line: `train`: say"
    )
    assert complaint(tmp_path, LEAST, "optim.betas=[1").startswith("command line: optim.betas: not YAML")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothere\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "nothere.yaml")
    with pytest.raises(UserError, match="Is a directory"):
        load_config(tmp_path)
    with pytest.raises(UserError, match="did you mean `preset:glm4-9b-0414-lora`"):
        load_config("glm4-9b-0414-lora")
    (tmp_path / "gbk.yaml").write_bytes(LEAST.encode() + "# 中文".encode("gbk"))
    with pytest.raises(UserError, match=r"gbk\.yaml:3: not UTF-8 text.*iconv"):
        load_config(tmp_path / "gbk.yaml")
    (tmp_path / "large.yaml").write_bytes(b"# " + b"x" * (2 << 20))
    with pytest.raises(UserError, match="larger than"):
        load_config(tmp_path / "large.yaml")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbf" + LEAST.encode())
    assert load_config(tmp_path / "c.yaml").model.path == "m"


@pytest.mark.parametrize(
    "name",
    ["m", "模型/数据", "1e-5", "yes", "off", "null", "~", "", "0o17", "010", "1:30", "1_000", "=", "<<", "-",
     "- x", "a: b", "#c", "'", '"', "a\nb", " a ", "\x85", "a\x85b c", "\u2028", "\U0001f600", "\udc80",
     "!x", "&a", "*a",
     ".inf", "2026-01-01"],
)  # fmt: skip
def test_what_is_written_is_read_back_exactly(tmp_path: Path, name: str) -> None:
    values = {
        "model": {"path": name},
        "data": {"train": [name, {"path": "b", "weight": 0.1 + 0.2}], "dev": None},
        "optim": {"learning_rate": 1e-5, "betas": (0.9, 0.95), "epsilon": 1e-8},
        "adapt": {"targets": [name]},
        "train": {"steps": 10**9, "seed": 10**12},
    }
    config = RunConfig.model_validate(values)
    text = to_yaml(config)
    assert load(tmp_path, text) == config
    assert to_yaml(load(tmp_path, text)) == text


def test_override_checks_the_whole_again(tmp_path: Path) -> None:
    config = load(tmp_path, LEAST + "train: {epochs: 2}")
    changed = override(config, ["train.steps=5", "data.max_tokens=64"])
    assert (changed.train.steps, changed.train.epochs, changed.data.max_tokens) == (5, None, 64)
    assert config.train.epochs == 2
    with pytest.raises(UserError, match="command line: `train` has no key `stps`"):
        override(config, ["train.stps=5"])


def test_every_preset_loads_and_says_for_whom() -> None:
    names = preset_names()
    models = ("chatglm3-6b", "glm4-9b-chat", "glm4-9b-0414", "glm4-32b-0414")
    methods = ("lora", "full", "freeze", "prefix", "pretrain")
    quantised = {"glm4-9b-chat-qlora", "glm4-9b-0414-qlora"}
    assert set(names) == {f"{model}-{method}" for model in models for method in methods} | quantised
    for name in names:
        config = load_config(f"preset:{name}", ["data.train=my.jsonl", "train.steps=3"])
        method = name.rsplit("-", 1)[1]
        assert config.adapt.method == {"pretrain": "full", "qlora": "lora"}.get(method, method)
        assert config.adapt.base == ("nf4" if method == "qlora" else "auto")
        assert config.model.path.split("/")[1].lower().replace("-", "").startswith(name.split("-")[0])
        text = (SCHEMA.parent / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# ")
        assert len(text.splitlines()) <= 8


def test_an_unknown_preset_lists_those_there_are() -> None:
    with pytest.raises(
        UserError, match=r"did you mean `preset:glm4-9b-0414-lora`\? there are chatglm3-6b-freeze, "
    ):
        load_config("preset:glm4-9b-0414-lra")


def test_the_schema_for_editors_is_up_to_date() -> None:
    expected = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    again = "print(json.dumps(json_schema(), indent=2, ensure_ascii=False)) writes it again"
    assert SCHEMA.read_text(encoding="utf-8") == expected, again


def test_the_schema_knows_what_a_lone_file_name_is() -> None:
    data = json_schema()["$defs"]["DataSection"]["properties"]
    assert {"type": "string"} in data["train"]["anyOf"]
    assert {"type": "null"} in data["dev"]["anyOf"]
    assert data["train"]["description"]


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


@pytest.mark.parametrize(
    ("said", "held_out"),
    [("2%", 0.02), ("'0.5 %'", 0.005), ("0.1", 0.1), ("500", 500), ("2e2", 200), ("null", None)],
)
def test_a_share_or_a_number_is_held_out(tmp_path: Path, said: str, held_out: float | None) -> None:
    dev = load(tmp_path, LEAST, f"data.dev={said}").data.dev
    assert dev == held_out
    assert type(dev) is type(held_out)
    again = load(tmp_path, to_yaml(load(tmp_path, LEAST, f"data.dev={said}")))
    assert again.data.dev == held_out


@pytest.mark.parametrize("said", ["0", "150%", "0%", "-3", "2.5", "true", "100%", "200%"])
def test_what_cannot_be_held_out(tmp_path: Path, said: str) -> None:
    assert "expected a share as 2%, a whole number of samples" in complaint(
        tmp_path, LEAST, f"data.dev={said}"
    )


def test_other_names_of_what_is_held_out(tmp_path: Path) -> None:
    assert "did you mean `dev`?" in complaint(tmp_path, LEAST, "data.val_size=0.1")
