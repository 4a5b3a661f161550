"""Recomputation on real blocks: the same gradients bit by bit, and the memory that was foretold."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from glm_accelerate.kernels.compiled import missing
from glm_accelerate.kernels.native.build import lacking
from glm_accelerate.kernels.rope import rope_table
from glm_accelerate.memory.measure import Alive, measure, measure_all, trace
from glm_accelerate.memory.recompute import FROZEN, BlockCosts, Plan, apply, choose, cost
from glm_accelerate.models.adapt import LoraSettings, add_lora
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder, Origin, RMSNorm
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.sizes import Sizes

Made = tuple[list[nn.Module], tuple[Any, ...]]  # blocks, and what the first is given
native = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))


class Plain(nn.Module):
    """An ordinary block of PyTorch's own operators, with dropout and one operator in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTH: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x_BTH)).unflatten(-1, (-1, 4, 16)).unbind(-3)
        out = scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        x_BTH = x_BTH + dropout(self.out(out.transpose(1, 2).flatten(2)), 0.2, self.training)
        inner = self.up(self.norm(x_BTH)).relu_()
        return x_BTH + dropout(self.down(inner), 0.2, self.training)


def compiled_norm(width: int) -> RMSNorm:
    norm = RMSNorm(width, 1e-5)
    nn.init.ones_(norm.weight)
    norm.form = "compiled"
    return norm


def plain() -> Made:
    return [Plain(64) for _ in range(4)], (torch.randn(2, 48, 64),)


def decoder(form: str, method: str, share: float = 0.3) -> Made:
    sizes = Sizes(
        vocabulary=64, width=128, mlp_width=320, layers=4, heads=8, kv_heads=2, head_width=16,
        norm_epsilon=1e-5, rope_theta=1e4, rope_width=16, qkv_bias=True, max_positions=512, sandwich=True,
    )  # fmt: skip
    model = Decoder(sizes, Origin("glm4", {}, "")).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    dtype = torch.float32 if form == "eager" else torch.bfloat16
    if method == "lora":
        model.to(dtype)
        add_lora(model, LoraSettings(rank=4, dropout=share))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
    model.compute = dtype
    bind_operators(model, compiled=form != "eager")
    layout = Layout.of_documents([(40, 88)])
    table = rope_table(layout.positions_BT, sizes.rope_width, sizes.rope_theta)
    return list(model.layers), (torch.randn(1, 128, 128, dtype=dtype), layout, table, None, None)


MAKERS = [
    pytest.param(plain, id="plain"),
    *(
        pytest.param(lambda f=form, m=method: decoder(f, m), id=f"{form}-{method}", marks=marks)
        for form, marks in (("eager", []), ("native", [native]))
        for method in ("lora", "full")
    ),
]

# What numpy makes, as the masks of this dropout, is measured but not counted by `Alive`.
MASKLESS = pytest.param(lambda: decoder("eager", "lora", 0.0), id="eager-lora-no-dropout")


def run(blocks: Sequence[nn.Module], inputs: tuple[Any, ...]) -> list[Tensor]:
    """The loss, its gradients, and a random number drawn afterwards."""
    torch.manual_seed(3)
    x = inputs[0].detach().requires_grad_()
    trained = [parameter for block in blocks for parameter in block.parameters() if parameter.requires_grad]
    out = x
    for block in blocks:
        out = block(out, *inputs[1:])
    loss = out.float().square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [x, *trained]), torch.rand(3)]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def some_plans(block: BlockCosts, count: int) -> list[Plan]:
    """Every option in turn, and mixtures."""
    plans: list[Plan] = [(option.keep,) * count for option in block.options]
    generator = random.Random(2)
    mixed = (tuple(generator.choice(block.options).keep for _ in range(count)) for _ in range(8))
    return [*plans, *mixed]


def undo(blocks: Sequence[nn.Module]) -> None:
    for block in blocks:
        vars(block).pop("forward", None)


@pytest.mark.parametrize("make", MAKERS)
def test_losses_and_gradients_are_the_same_bit_by_bit(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    blocks, inputs = make()
    expected = run(blocks, inputs)
    measured = measure(blocks[0], *inputs, repeats=1)
    assert len(measured.options) > 3
    for plan in some_plans(measured, len(blocks)):
        apply(blocks, plan)
        assert equal(run(blocks, inputs), expected), plan
        undo(blocks)
    assert equal(run(blocks, inputs), expected)


def held(blocks: Sequence[nn.Module], inputs: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes that stay after the forward pass, and the most of both passes, as they really are."""
    with Alive() as alive:
        out = inputs[0].detach().clone().requires_grad_()
        for block in blocks:
            out = block(out, *inputs[1:])
        slope = torch.ones_like(out)
        kept = alive.now - 2 * slope.nbytes  # without what the last returned, and its gradient
        out.backward(slope)
    for block in blocks:
        block.zero_grad(set_to_none=True)
    return kept, alive.most - out.nbytes


@pytest.mark.parametrize("make", [*MAKERS[:1], *MAKERS[2:], MASKLESS])
def test_what_stays_and_the_most_at_once_are_as_foretold(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    blocks, inputs = make()
    held(blocks, inputs)
    measured = measure(blocks[0], *inputs, repeats=1)
    chain = [measured] * len(blocks)
    for plan in some_plans(measured, len(blocks)):
        apply(blocks, plan)
        kept, most = held(blocks, inputs)
        undo(blocks)
        foretold = sum(measured.given + measured.option(keep).kept for keep in plan)
        assert foretold * 0.99 - 2048 <= kept <= foretold * 1.01 + 2048, plan
        peak = cost(chain, plan).peak
        assert most <= peak * 1.03 + 2048, plan
        assert most >= peak * 0.85, plan


def test_masks_that_numpy_draws_are_counted() -> None:
    with_masks, without = (
        trace(blocks[0], *inputs, repeats=1)
        for blocks, inputs in (decoder("eager", "lora", share) for share in (0.3, 0.0))
    )
    masks = 4 * 128 * (5 * 128 + 320)  # one for each adapter, as wide as what it is given
    assert with_masks.saved - without.saved == masks
    assert sum(result.kept for result in with_masks.results) < with_masks.saved + masks


def test_measuring_leaves_nothing_behind() -> None:
    blocks, inputs = plain()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure(blocks[0], *inputs)
    assert torch.equal(torch.rand(3), expected)
    assert all(parameter.grad is None for parameter in blocks[0].parameters())
    assert not inputs[0].requires_grad


class Odd(nn.Module):
    """Reads a result before all is written into it, and draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        early = x * 2
        read = early + 1
        early.mul_(3)
        noise = torch.rand_like(x)
        late = x.cos()
        late.add_(1)
        return (read.sin() * noise + early * late).tanh()


def test_what_must_not_be_kept_is_not_offered() -> None:
    x = torch.randn(300, 300)
    traced = trace(Odd(), x, repeats=1)
    offered = {tuple(sorted(name for name, _ in result.calls)) for result in traced.results}
    assert ("aten.add_.Tensor", "aten.cos.default") in offered
    assert ("aten.sin.default",) in offered
    assert not any(word in name for names in offered for name in names for word in ("rand", "mul_"))
    measured = measure(Odd(), x, repeats=1)
    blocks = [Odd(), Odd()]
    expected = run(blocks, (x,))
    for plan in some_plans(measured, 2):
        apply(blocks, plan)
        assert equal(run(blocks, (x,)), expected)
        undo(blocks)


def test_each_kind_of_block_is_measured_once() -> None:
    blocks, inputs = decoder("eager", "full")
    for block in blocks[:2]:
        block.requires_grad_(False)
    blocks[3].self_attn.requires_grad_(False)
    chain = measure_all(blocks, *inputs, repeats=1)
    assert chain[:2] == [FROZEN, FROZEN]
    assert chain[2].left > chain[3].left > 0
    expected = run(blocks, inputs)
    chosen = choose(chain, cost(chain, (None, None, (), ())).peak, grain=1)
    assert chosen is not None
    assert chosen[:2] == (None, None)
    assert chosen[2] is not None
    apply(blocks, chosen)
    assert equal(run(blocks, inputs), expected)
    undo(blocks)
    blocks[0].requires_grad_(True)
    again = measure_all(blocks[:3], *inputs, repeats=1)
    assert again[0] is again[2]
    assert again[1].left == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.skipif(missing("cpu") is not None, reason=str(missing("cpu")))
def test_bodies_made_by_torch_compile_run_within() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 64), compiled_norm(64)) for _ in range(2)]
    x = torch.randn(2, 32, 64)
    expected = run(blocks, (x,))
    for plan in some_plans(measure(blocks[0], x, repeats=1), 2):
        apply(blocks, plan)
        assert equal(run(blocks, (x,)), expected)
        undo(blocks)


def test_nothing_is_recomputed_without_gradients() -> None:
    blocks, (x,) = plain()
    blocks[0].eval()
    expected = blocks[0](x)
    apply(blocks, ((),) * 4)
    with torch.no_grad():
        assert torch.equal(blocks[0](x), expected)
    assert [name for name in blocks[0].state_dict() if "forward" in name] == []


def test_less_memory_is_chosen_and_had() -> None:
    torch.manual_seed(0)
    blocks, inputs = plain()
    chain = [measure(blocks[0], *inputs, repeats=1)] * len(blocks)
    _, before = held(blocks, inputs)
    chosen = choose(chain, int(before * 0.8), grain=1)
    assert chosen is not None
    apply(blocks, chosen)
    _, after = held(blocks, inputs)
    assert after <= before * 0.8
