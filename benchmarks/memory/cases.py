"""Sizes whose memory is foretold: small ones, which tests measure, and GLM-4-9B, which a GPU measures."""

from dataclasses import replace

from glm_accelerate.memory.job import Job
from glm_accelerate.models.sizes import Sizes

SMALL = Sizes(8000, 512, 1712, 8, 8, 2, 64, 1e-5, 1e4, 32, False, 32768, sandwich=True)  # the race's
GLM4 = replace(SMALL, sandwich=False, qkv_bias=True)
CHATGLM = replace(GLM4, fused_qkv=True)
NINE_B = Sizes(151_552, 4096, 13_696, 40, 32, 2, 128, 1e-5, 1e4, 64, False, 131_072, sandwich=True)
QKV = ("q_proj", "k_proj", "v_proj")

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
