"""Text that never shows half a character, and turns that are remembered."""

import io

import pytest
import sentencepiece
import torch

from glm_accelerate.data.encode import encode_prompt
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.types import Message
from glm_accelerate.demo.tiny import build_tokenizer
from glm_accelerate.generate.answer import generate
from glm_accelerate.generate.chat import Chat, readable
from glm_accelerate.generate.sample import GREEDY
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.runtime.errors import UserError

TEXT = "hello  world, 你好 café 😀👍🏽 é\n\n  fine"


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """Every letter beyond ASCII is several tokens."""
    directory = tmp_path_factory.mktemp("bytes")
    build_tokenizer(["hello", " world"]).save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """SentencePiece: words have their space before them, and rare letters are bytes."""
    directory = tmp_path_factory.mktemp("pieces")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world, fine"] * 5), model_writer=model, vocab_size=300,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    (directory / "config.json").write_text('{"model_type": "chatglm", "_name_or_path": "chatglm3-6b"}')
    return load_tokenizer(directory)


@pytest.mark.parametrize("kind", ["bytewise", "pieces"])
def test_no_half_of_a_character_is_ever_shown(kind, request):
    tokenizer = request.getfixturevalue(kind)
    (ids,) = tokenizer.encode([TEXT])
    shown = list(readable(iter(ids), tokenizer))
    assert "".join(shown) == TEXT
    assert all("\ufffd" not in text for text in shown)
    assert len(shown) > 12  # as they come, not at the end
    assert any(text == "😀" for text in shown)


def test_an_answer_that_ends_within_a_character_shows_it(bytewise):
    (ids,) = bytewise.encode(["good 😀"])
    shown = "".join(readable(ids[:-1], bytewise))
    assert shown.startswith("good ")
    assert shown.endswith("\ufffd")
    assert list(readable([], bytewise)) == [""]


@pytest.fixture
def model(bytewise) -> Decoder:
    sizes = Sizes(
        vocabulary=bytewise.vocab_size, width=24, mlp_width=40, layers=2, heads=6, kv_heads=2, head_width=8,
        norm_epsilon=1e-5, rope_theta=1e4, rope_width=4, qkv_bias=True, max_positions=200, sandwich=True,
    )  # fmt: skip
    model = Decoder(sizes, Origin("glm4", {}, "nowhere"))
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
    return model.requires_grad_(False)


@pytest.fixture
def chat(model, bytewise) -> Chat:
    return Chat(
        model, bytewise, get_template("glm4-0414"), sampling=GREEDY, max_new_tokens=12, system="Be brief."
    )


def wanted(chat, model, tokenizer, messages) -> str:
    """The answer by generating all of it and decoding it at once."""
    template = get_template("glm4-0414")
    prompt = encode_prompt(messages, template, tokenizer)
    stops = {tokenizer.special(name) for name in template.stops}
    (ids,) = generate(model, [prompt], stops=stops, max_new_tokens=12)
    return tokenizer.decode(ids).lstrip()


def test_turns_are_remembered_and_forgotten(chat, model, bytewise):
    messages = [Message("system", "Be brief.")]
    for question in ("hello", "what?"):
        messages.append(Message("user", question))
        answer = wanted(chat, model, bytewise, messages)
        assert answer
        assert "".join(chat.ask(question)) == answer
        messages.append(Message("assistant", answer.strip()))
        assert chat.messages == messages
    chat.clear()
    assert chat.messages == messages[:1]


def test_an_answer_that_is_broken_off_is_remembered_as_far_as_it_came(chat):
    whole = "".join(chat.ask("hello"))
    chat.clear()
    answer = chat.ask("hello")
    first = next(answer)
    answer.close()
    assert whole.startswith(first)
    assert chat.messages[-2:] == [Message("user", "hello"), Message("assistant", first.strip())]


def test_a_question_that_is_too_long_is_not_remembered(chat):
    with pytest.raises(UserError, match="200 positions"):
        list(chat.ask("x" * 300))
    assert chat.messages == [Message("system", "Be brief.")]
