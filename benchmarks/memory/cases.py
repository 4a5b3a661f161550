"""Configurations whose prediction is held against a measurement, and large ones that are only predicted."""

from dataclasses import replace

from glm_accelerate.memory.job import Job
from glm_accelerate.models.sizes import Sizes

SMALL = Sizes(8000, 512, 1712, 8, 8, 2, 64, 1e-5, 1e4, 32, False, 32768, sandwich=True)  # the race's
GLM4 = replace(SMALL, sandwich=False, qkv_bias=True)
CHATGLM = replace(GLM4, fused_qkv=True)
SHARED = replace(SMALL, shared_qk=2, ranks={f"layers.{n}.mlp.down_proj": 128 for n in range(8)})
WORDS = replace(SMALL, vocabulary=151_552, width=128, mlp_width=432, heads=2, kv_heads=1)
NINE_B = Sizes(151_552, 4096, 13_696, 40, 32, 2, 128, 1e-5, 1e4, 64, False, 131_072, sandwich=True)
QKV = ("q_proj", "k_proj", "v_proj")

LORA = Job(SMALL, form="native", pass_tokens=1024, longest=256, learnt=1024)
EAGER = replace(LORA, form="eager")
FULL = replace(LORA, method="full")

MEASURED: dict[str, Job] = {
    "LoRA": LORA,
    "LoRA, q k v": replace(LORA, adapted=QKV),
    "LoRA, 2,048 tokens, blocks": replace(
        LORA, recompute="blocks", pass_tokens=2048, longest=2048, learnt=700
    ),
    "LoRA, ChatGLM, 512 tokens": replace(LORA, sizes=CHATGLM, pass_tokens=512, learnt=300),
    "LoRA, eager": EAGER,
    "LoRA, eager, one document, blocks": replace(EAGER, recompute="blocks", longest=1024),
    "LoRA, 151,552 words": replace(LORA, sizes=WORDS, pass_tokens=512, learnt=512),
    "LoRA, nf4 base": replace(LORA, base="nf4"),
    "LoRA, int8 base, blocks": replace(LORA, base="int8", recompute="blocks"),
    "full": FULL,
    "full, two passes of 2,048, blocks": replace(
        FULL, recompute="blocks", passes=2, pass_tokens=2048, longest=512, learnt=2048
    ),
    "full, eager, GLM-4": replace(FULL, sizes=GLM4, form="eager", pass_tokens=512, learnt=512),
    "full, Adafactor, 256 tokens": replace(FULL, optimizer="adafactor", pass_tokens=256, learnt=256),
    "full, 151,552 words": replace(FULL, sizes=WORDS, pass_tokens=512, learnt=512),
    "freeze": replace(LORA, method="freeze"),
    "prefix": replace(LORA, method="prefix"),
    "LoRA, 2 ranks": replace(LORA, ranks=2),
    "LoRA, 2 ranks, divided": replace(LORA, ranks=2, shards=2),
    "full, 2 ranks, divided": replace(FULL, ranks=2, shards=2),
    "full, 2 ranks, divided, blocks": replace(FULL, ranks=2, shards=2, recompute="blocks"),
    "full, 2 ranks, compressed, divided": replace(FULL, sizes=SHARED, ranks=2, shards=2),
    "full, 2 ranks, compressed, divided, blocks": replace(
        FULL, sizes=SHARED, ranks=2, shards=2, recompute="blocks"
    ),
}

LARGE = Job(NINE_B, device="cuda", form="triton", pass_tokens=1024, longest=1024, learnt=1024)
BLOCKS = replace(LARGE, recompute="blocks")
LARGE_FULL = replace(BLOCKS, method="full")
# With what is published or asked for: GB in all, as an allocator and the driver count.
PREDICTED: dict[str, tuple[Job, str]] = {
    "LoRA, q k v, all kept": (replace(LARGE, adapted=QKV), "stock: 22 GB"),
    "LoRA, q k v, blocks": (replace(BLOCKS, adapted=QKV), "<= 18.8 + 2.1 GB above CUDA's own"),
    "LoRA, all layers, blocks, 6,000 tokens": (
        replace(BLOCKS, pass_tokens=6016, longest=6016, learnt=6000),
        "24 GiB",
    ),
    "LoRA, int8 base, blocks": (replace(BLOCKS, base="int8"), "<= 14.7 GB"),
    "LoRA, nf4 base, blocks": (replace(BLOCKS, base="nf4"), "<= 8 GB"),
    "full, AdamW": (LARGE_FULL, "-"),
    "full, AdamW in 8 bits, fused": (
        replace(LARGE_FULL, optimizer="adamw8bit", fuse_update=True),
        "80 GiB",
    ),
    "full, Adafactor, fused": (replace(LARGE_FULL, optimizer="adafactor", fuse_update=True), "80 GiB"),
    "full, optimizer on the host": (replace(LARGE_FULL, offload=frozenset({"optimizer"})), "24 GiB"),
    "full, 8 ranks": (replace(LARGE_FULL, ranks=8, shards=8), "-"),
}
