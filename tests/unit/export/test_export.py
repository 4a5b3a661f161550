"""What is exported is what was trained, and other programs open it."""

import json
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from glm_accelerate.assemble.model import open_model
from glm_accelerate.export.directory import new_directory
from glm_accelerate.export.export import export
from glm_accelerate.models.weights import load_model
from glm_accelerate.runtime.errors import UserError

TOKENS = torch.randint(0, 200, (2, 23), generator=torch.Generator().manual_seed(0))


def difference(ours, theirs) -> float:
    """Largest difference of logits, as a share of the largest logit."""
    with torch.no_grad():
        mine, other = ours(TOKENS), theirs(TOKENS)
        other = other if isinstance(other, torch.Tensor) else other.logits
    return float((mine - other).abs().max() / mine.abs().max())


def listing(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("family", ["glm", "glm4", "chatglm"])
def test_a_merged_model_opens_in_transformers(family, make_base, make_run, tmp_path):
    base = make_base(family)
    run, model = make_run(base, "glm4" if family == "chatglm" else "glm4-0414", rank=4)
    made = export(run, tmp_path / "out", merge_adapter=True)
    assert (made.kind, made.step, made.missing) == ("model", 7, ())
    theirs = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32).eval()
    assert type(theirs).__name__ == {"glm4": "Glm4ForCausalLM"}.get(family, "GlmForCausalLM")
    assert difference(model, theirs) < 1e-5
    assert difference(load_model(base), theirs) > 1e-2  # something was trained
    assert difference(model, load_model(made.path)) < 1e-5


def test_a_merged_model_brings_its_tokenizer_and_every_stop_token(make_base, make_run, tmp_path):
    base = make_base("glm4", eos_token_id=[1])
    (base / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 1, "temperature": 0.8, "do_sample": True})
    )
    run, _ = make_run(base, "glm4-0414", method="full")
    made = export(run, tmp_path / "out", merge_adapter=False)
    assert made.kind == "model"
    assert listing(made.path) == {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    stops = [
        tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|user|>", "<|observation|>")
    ]
    said = json.loads((made.path / "generation_config.json").read_text())
    assert said["eos_token_id"][0] == 1
    assert set(said["eos_token_id"]) == {1, *stops}
    assert said["temperature"] == 0.8
    theirs = AutoModelForCausalLM.from_pretrained(made.path)
    assert set(theirs.generation_config.eos_token_id) == {1, *stops}


# peft asks transformers by a name that transformers is about to drop
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_alone_opens_in_peft(make_base, make_run, tmp_path):
    base = make_base("glm4")
    run, model = make_run(base, "glm4-0414", rank=4)
    made = export(run / "checkpoints" / "checkpoint-7", tmp_path / "out", merge_adapter=False)
    assert made.kind == "adapter"
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= listing(made.path)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), made.path
    )
    assert difference(model, theirs.eval()) < 1e-5
    # and back: an exported adapter is merged with its base
    merged = export(made.path, tmp_path / "merged", merge_adapter=True, base=base)
    assert difference(model, load_model(merged.path)) < 1e-5


def test_a_prefix_alone(make_base, make_run, tmp_path):
    base = make_base("glm4")
    run, model = make_run(base, "glm4-0414", method="prefix", prefix_tokens=3)
    made = export(run, tmp_path / "out", merge_adapter=False)
    assert made.kind == "prefix"
    assert difference(model, open_model(made.path, base=base).model) == 0
    with pytest.raises(UserError, match="cannot be merged"):
        export(run, tmp_path / "merged", merge_adapter=True)
    assert not (tmp_path / "merged").exists()


def test_the_original_layout_keeps_names_and_brings_the_code_files(make_base, make_run, tmp_path):
    base = make_base("chatglm")
    run, model = make_run(base, "glm4", rank=4)
    made = export(run, tmp_path / "out", merge_adapter=True, layout="original")
    code = {"tokenization_chatglm.py", "configuration_chatglm.py", "modeling_chatglm.py", "quantization.py"}
    assert code <= listing(made.path)
    assert made.missing == ()
    assert difference(model, load_model(made.path)) < 1e-5
    config = json.loads((made.path / "config.json").read_text())
    assert config["model_type"] == "chatglm"
    assert config["rope_ratio"] == 500
    assert config["auto_map"]["AutoConfig"] == "configuration_chatglm.ChatGLMConfig"


def test_code_files_that_are_not_there_are_named(make_base, make_run, tmp_path):
    base = make_base("chatglm")
    (base / "configuration_chatglm.py").unlink()
    run, _ = make_run(base, "glm4", rank=4)
    made = export(run, tmp_path / "out", merge_adapter=True, layout="original")
    assert made.missing == ("configuration_chatglm.py",)


def test_full_fine_tuning_is_written_as_wide_as_its_base_was(make_base, make_run, tmp_path):
    base = make_base("glm4", torch_dtype="bfloat16")
    run, _ = make_run(base, "glm4-0414", method="full")
    for dtype, wanted in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        made = export(run, tmp_path / str(wanted), merge_adapter=False, dtype=dtype)
        assert {p.dtype for p in load_model(made.path).parameters()} == {wanted}
        assert json.loads((made.path / "config.json").read_text())["torch_dtype"] == str(wanted).removeprefix(
            "torch."
        )


def test_nothing_is_written_over(make_base, make_run, tmp_path):
    run, _ = make_run(make_base("glm4"), "glm4-0414", rank=4)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export(run, out, merge_adapter=True)
    (out / "mine.txt").unlink()
    export(run, out, merge_adapter=True)  # an empty directory may be filled
    with pytest.raises(UserError, match="exists already"):
        export(run, out / "config.json", merge_adapter=True)
    assert not list(tmp_path.glob(".*partial"))


def test_of_two_exports_to_one_place_one_wins_whole(tmp_path):
    """Whoever is second is refused, and neither takes the other's files away."""
    out = tmp_path / "out"
    with ExitStack() as first, ExitStack() as second:
        one, other = first.enter_context(new_directory(out)), second.enter_context(new_directory(out))
        (one / "config.json").write_text("one")
        (other / "config.json").write_text("other")
        assert (one / "config.json").read_text() == "one"
        second.close()
        with pytest.raises(UserError, match="cannot be written"):
            first.close()
    assert (out / "config.json").read_text() == "other"
    assert listing(tmp_path) == {"out"}


def test_what_a_kill_has_left_goes_after_a_day(tmp_path):
    old, young = tmp_path / ".out.01234567.partial", tmp_path / ".out.76543210.partial"
    for path in (old, young):
        path.mkdir()
    os.utime(old, (0, 0))
    with new_directory(tmp_path / "out") as directory:
        (directory / "config.json").touch()
    assert listing(tmp_path) == {"out", young.name}


def test_a_file_that_may_not_be_read_is_no_damage(make_base, make_run):
    """The system's own words, and no cure for a file that is cut off."""
    with tempfile.TemporaryDirectory() as folder:  # where another user may pass, as pytest's own may not
        place = Path(shutil.copytree(make_base("glm4"), Path(folder) / "model"))
        Path(folder).chmod(0o755)
        (place / "model.safetensors").chmod(0o000)
        us = os.geteuid()
        if us == 0:
            os.seteuid(65534)  # root may read everything
        try:
            with pytest.raises(UserError, match=r"model\.safetensors: cannot be read: Permission denied$"):
                load_model(place)
        finally:
            os.seteuid(us)


def test_a_directory_that_cannot_be_written_is_an_error_of_one_line(make_base, make_run, tmp_path):
    run, _ = make_run(make_base("glm4"), "glm4-0414", rank=4)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        export(run, tmp_path / "file" / "out", merge_adapter=True)


def test_a_link_is_followed_to_where_the_model_shall_be(make_base, make_run, tmp_path):
    run, _ = make_run(make_base("glm4"), "glm4-0414", rank=4)
    for name in ("there", "to come"):
        link = tmp_path / f"link to {name}"
        link.symlink_to(tmp_path / "disk" / name)
        (tmp_path / "disk/there").mkdir(parents=True, exist_ok=True)
        made = export(run, link, merge_adapter=True)
        assert link.is_symlink()
        assert (tmp_path / "disk" / name / "config.json").is_file()
        assert "config.json" in listing(made.path)


def test_a_place_that_cannot_be_replaced_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    missing = tmp_path / "no run"
    with pytest.raises(UserError, match=r"is a mount point.*name one below it: /model"):
        export(missing, Path("/"), merge_adapter=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for word in (".", "../here"):
        with pytest.raises(UserError, match="is the current directory"):
            export(missing, Path(word), merge_adapter=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="exists already"):
        export(missing, Path("."), merge_adapter=True)


@pytest.mark.parametrize("said", [{"eos_token_id": None}, {}])
def test_a_base_without_an_end_token_ends_with_the_templates(said, make_base, make_run, tmp_path):
    base = make_base("glm4", eos_token_id=None)
    (base / "generation_config.json").write_text(json.dumps(said))
    run, _ = make_run(base, "glm4-0414", method="full")
    made = export(run, tmp_path / "out", merge_adapter=False)
    ends = json.loads((made.path / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == 3
    assert None not in ends
