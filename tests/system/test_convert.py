"""`convert` as a person runs it, then a chat with what it wrote."""

import torch
from safetensors.torch import load_file

from glm_accelerate.demo.tiny import build_tokenizer


def test_old_weights_become_a_model_that_answers(make_model, tmp_path, warm):
    tokenizer = build_tokenizer(["hello"])
    source = make_model("chatglm", padded_vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenization_chatglm.py").write_text("# knows <|observation|>, so it is ChatGLM3's\n")
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    for number in (1, 2):
        part = {name: weights[name] for name in names[number - 1 :: 2]}
        torch.save(part, source / f"pytorch_model-0000{number}-of-00002.bin")

    refused = warm("chat", str(source), "--ask", "hello", cwd=tmp_path).done()
    assert refused.returncode == 2
    assert f"glm-accelerate convert {source} OUT" in refused.stderr

    done = warm("convert", str(source), "out", cwd=tmp_path).done()
    assert done.returncode == 0, done.stderr
    assert f"{len(weights)} tensors in out" in done.stdout
    written: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        written |= load_file(path)
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    again = warm("convert", str(source), "out", cwd=tmp_path).done()
    assert again.returncode == 2
    assert "exists already" in again.stderr
