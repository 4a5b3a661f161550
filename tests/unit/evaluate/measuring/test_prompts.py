"""The model is never shown what it is asked: in every family, on real encodings, the prompt of an evaluation
is that of the conversation before its last answer, and whatever the answer says changes nothing of it.
"""

import io
import json

import pytest
import sentencepiece

from benchmarks.evaluation.prompts import honest, leaking
from glm_accelerate.data.encode import Kept, encode, encode_prompt
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import Tokenizer, load_tokenizer
from glm_accelerate.data.types import Conversation, FilePlace, Message, ToolCall
from glm_accelerate.demo.tiny import write_tiny
from glm_accelerate.evaluate.measuring.losses import split

# Words that stand in answers alone, so that their tokens are found wherever they should not be.
ANSWER, OTHER = "ΨΩΨΩ ЖЩЖЩ", "ЮЯЮЯ"
WORDS = [
    "The weather in Paris?",
    "你好，今天天气怎么样？",
    "你是助手。",
    '{"city": "Paris"}',
    "22 degrees",
    ANSWER,
    OTHER,
]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "天气", "parameters": {}}}
CALL = Message("assistant", "", call=ToolCall("get_weather", '{"city": "Paris"}'))

SINGLE = (Message("user", "The weather in Paris?"), Message("assistant", ANSWER))
TURNS = (
    Message("user", "你好，今天天气怎么样？"),
    Message("assistant", "22 degrees"),
    Message("user", "The weather in Paris?"),
    Message("assistant", ANSWER),
)
SYSTEM = (Message("system", "你是助手。"), *TURNS)
AGENT = (
    Message("system", "你是助手。", (TOOL,)),
    Message("user", "The weather in Paris?"),
    CALL,
    Message("observation", "22 degrees"),
    Message("assistant", ANSWER),
)
CASES = {"single": SINGLE, "turns": TURNS, "system": SYSTEM, "agent": AGENT}
FAMILIES = ("chatglm2", "chatglm3", "glm4", "glm4-0414")


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """SentencePiece for the ChatGLMs, byte-level BPE with GLM-4's special tokens for the others."""
    made: dict[str, Tokenizer] = {}
    for family, code in (("chatglm2", ""), ("chatglm3", "# <|observation|>")):
        directory = tmp_path_factory.mktemp(family)
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(WORDS * 8), model_writer=model, vocab_size=420, model_type="bpe",
            byte_fallback=True, hard_vocab_limit=False, character_coverage=1.0, minloglevel=2,
            normalization_rule_name="identity", remove_extra_whitespaces=False,
        )  # fmt: skip
        (directory / "tokenizer.model").write_bytes(model.getvalue())
        (directory / "config.json").write_text(
            json.dumps({"model_type": "chatglm", "padded_vocab_size": 65024})
        )
        (directory / "tokenization_chatglm.py").write_text(code)
        made[family] = load_tokenizer(directory)
    words = [word for text in WORDS for word in text.split()]
    made["glm4"] = made["glm4-0414"] = load_tokenizer(write_tiny(tmp_path_factory.mktemp("glm4"), words))
    return made


def sample_of(
    messages: tuple[Message, ...], family: str, tokenizer: Tokenizer, train_on: str = "all"
) -> Kept:
    conversation = Conversation(messages, FilePlace("dev.jsonl", 1))
    [sample] = encode([conversation], get_template(family), tokenizer, train_on=train_on, max_tokens=2048)
    assert isinstance(sample, Kept)
    return sample


POSSIBLE = [
    (family, case) for family in FAMILIES for case in CASES if (family, case) != ("chatglm2", "agent")
]


@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize(("family", "case"), POSSIBLE)
def test_the_prompt_is_that_of_the_conversation_before_its_last_answer(family, case, train_on, tokenizers):
    messages, tokenizer, template = CASES[case], tokenizers[family], get_template(family)
    stops = {tokenizer.special(name) for name in template.stops}
    prompt, reference = split(sample_of(messages, family, tokenizer, train_on), stops)
    assert prompt == encode_prompt(messages[:-1], template, tokenizer)
    if family == "chatglm2":
        assert tokenizer.decode(prompt).endswith("答：")
    else:
        assert prompt[-1] == tokenizer.special("<|assistant|>")
    assert not stops & set(reference)
    assert tokenizer.decode(reference).strip() == ANSWER
    blank = set(tokenizer.encode([" "])[0])
    in_answer = set(tokenizer.encode([ANSWER])[0]) - blank
    assert in_answer
    assert in_answer <= set(reference)
    assert not in_answer & set(prompt)


@pytest.mark.parametrize(("family", "case"), POSSIBLE)
def test_whatever_is_answered_the_prompt_is_the_same(family, case, tokenizers):
    messages, tokenizer = CASES[case], tokenizers[family]
    stops = {tokenizer.special(name) for name in get_template(family).stops}
    other = (*messages[:-1], Message("assistant", OTHER))
    asked = [split(sample_of(said, family, tokenizer), stops) for said in (messages, other)]
    assert asked[0][0] == asked[1][0]
    assert asked[0][1] != asked[1][1]


@pytest.mark.parametrize("family", ["chatglm3", "glm4", "glm4-0414"])
def test_a_call_is_asked_for_like_any_answer(family, tokenizers):
    """The conversation ends with the call of a tool: its name and arguments are the reference."""
    messages, tokenizer, template = AGENT[:3], tokenizers[family], get_template(family)
    stops = {tokenizer.special(name) for name in template.stops}
    prompt, reference = split(sample_of(messages, family, tokenizer), stops)
    assert prompt == encode_prompt(messages[:2], template, tokenizer)
    assert "get_weather" in tokenizer.decode(reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_document_asks_nothing(family, tokenizers):
    tokenizer, template = tokenizers[family], get_template(family)
    document = Conversation((), FilePlace("dev.jsonl", 1), text="The weather in Paris? " * 30)
    stops = {tokenizer.special(name) for name in template.stops}
    for limit in (2048, 32):
        parts = encode([document], template, tokenizer, max_tokens=limit)
        assert [split(part, stops) for part in parts if isinstance(part, Kept)] == [None] * len(parts)


@pytest.mark.parametrize("case", ["single", "turns", "system"])
def test_the_stock_prompts_hold_the_answer_and_the_honest_ones_do_not(case, tokenizers):
    """What the benchmark runs as the stock way: with the shipped settings all of the reference stands in the
    prompt. With combine off it does not, and the question is ours.
    """
    messages, tokenizer = CASES[case], tokenizers["glm4-0414"]
    template = get_template("glm4-0414")
    sample = sample_of(messages, "glm4-0414", tokenizer)
    answer = tokenizer.encode([f"\n{ANSWER}"])[0]
    whole = sample.tokens.tolist()[:-1]  # as a chat template writes it, without our stop token
    [question] = leaking(whole, tokenizer.special("<|assistant|>"), stop=sample.tokens[-1].item())
    assert question.prompt == [*whole, whole[0]]  # the answer, and [gMASK] after it
    assert question.prompt[-1 - len(answer) : -1] == answer
    assert question.reference == [tokenizer.special("<|assistant|>"), *answer, sample.tokens[-1]]
    turns = [encode_prompt([m], template, tokenizer)[2:-1] for m in messages]
    questions = honest(turns, [m.role for m in messages], whole[:2], stop=sample.tokens[-1].item())
    assert len(questions) == sum(message.role == "assistant" for message in messages)
    stops = {tokenizer.special(name) for name in template.stops}
    assert (questions[-1].prompt, questions[-1].reference[:-1]) == split(sample, stops)
