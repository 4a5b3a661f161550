"""A model directory of GLM-4-0414's kind: a tokenizer of single bytes, and the template in our words."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}<|system|>
# 可用工具
{% for tool in tools %}

## {{ tool.function.name }}

{{ tool.function | tojson(indent=4, ensure_ascii=False) }}
在调用上述函数时，请使用 Json 格式表示调用的参数。
{%- endfor %}
{%- endif %}
{%- for turn in messages if turn.role == 'system' %}<|system|>
{{ turn.content }}
{%- endfor %}
{%- for turn in messages if turn.role != 'system' -%}
<|{{ turn.role }}|>{% if turn.metadata %}{{ turn.metadata }} {% endif %}
{{ '\\n' + turn.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(BPE({char: number for number, char in enumerate(alphabet)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(SPECIAL)
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4"}))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    return tmp_path
