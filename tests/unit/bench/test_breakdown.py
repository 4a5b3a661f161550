"""A step's time by class: of a real profile on the CPU, and of events as a GPU's profile has them."""

import time

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.functional import gelu, scaled_dot_product_attention

from glm_accelerate.bench import breakdown
from glm_accelerate.bench.breakdown import STEP, profiled, summed

CPU = torch.device("cpu")


def test_every_second_of_a_step_has_its_class() -> None:
    weight = torch.randn(400, 400, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], foreach=True)

    def step() -> float:
        time.sleep(0.05)  # as if its batches were late
        x = gelu(torch.randn(1000, 400) @ weight)
        q = x.view(2, 4, 500, 100)
        scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        optimizer.step()
        return 0.05

    found = profiled(step, CPU)
    assert sum(found.classes.values()) == pytest.approx(found.seconds, rel=1e-6)
    wanted = (breakdown.PRODUCTS, breakdown.ATTENTION, breakdown.ELEMENTWISE, breakdown.OPTIMIZER)
    assert all(found.classes[kind] > 0 for kind in wanted)
    assert found.classes[breakdown.DATA] == 0.05
    assert found.classes[breakdown.DATA] > 0.1 * found.seconds
    kinds = {one.name: one.kind for one in found.operators}
    assert kinds["aten::mm"] == breakdown.PRODUCTS
    assert kinds["aten::gelu"] == breakdown.ELEMENTWISE
    assert [one.seconds for one in found.operators] == sorted(one.seconds for one in found.operators)[::-1]
    assert found.synchronisations is None


def test_what_runs_inside_the_optimizer_is_the_optimizers() -> None:
    weight = torch.zeros(50, requires_grad=True)
    weight.grad = torch.ones(50)
    optimizer = torch.optim.AdamW([weight], foreach=False)

    def step() -> float:
        optimizer.step()
        return 0.0

    found = profiled(step, CPU)
    assert found.classes[breakdown.OPTIMIZER] > 0
    assert found.classes[breakdown.ELEMENTWISE] == 0


def event(name: str, start: float, end: float, device: DeviceType, *, note: bool = False) -> FunctionEvent:
    return FunctionEvent(0, name, 0, start, end, device_type=device, is_user_annotation=note)


def test_on_a_gpu_kernels_count_and_waiting_is_what_they_leave() -> None:
    gpu, cpu = DeviceType.CUDA, DeviceType.CPU
    found = summed(
        [
            event(STEP, 0, 1000, cpu),
            event(STEP, 0, 1000, gpu, note=True),
            event("Optimizer.step#AdamW.step", 800, 900, gpu, note=True),
            event("triton_poi_fused_mul_0", 700, 900, gpu, note=True),  # kernels have notes too
            event("aten::mm", 0, 900, cpu),  # its time on the CPU is that of launching
            event("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 100, 500, gpu),
            event("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 500, 600, gpu),
            event("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>", 600, 700, gpu),
            event("void elementwise_kernel<MulFunctor<float>::{lambda(int)#1}>", 700, 750, gpu),
            event("void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", 800, 850, gpu),
            event("cudaStreamSynchronize", 950, 960, cpu),
            event("cudaDeviceSynchronize", 990, 999, cpu),  # ours, to read the clock
            event("cudaStreamSynchronize", 1500, 1600, cpu),  # the profiler's, after the step
        ],
        waited=0.0001,
    )
    assert found.seconds == 0.001
    assert found.synchronisations == 1
    classes = {kind: round(taken * 1e6) for kind, taken in found.classes.items() if taken > 1e-9}
    assert classes == {
        breakdown.PRODUCTS: 500,
        breakdown.ATTENTION: 100,
        breakdown.ELEMENTWISE: 50,
        breakdown.OPTIMIZER: 50,
        breakdown.DATA: 100,
        breakdown.GAPS: 200,
    }
    assert (found.operators[0].calls, found.operators[0].kind) == (2, breakdown.PRODUCTS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", breakdown.PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", breakdown.PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", breakdown.PRODUCTS),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", breakdown.ATTENTION),
        ("fmha_cutlassB_bf16_aligned_128x64_k128_sm80(...)", breakdown.ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", breakdown.ATTENTION),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNorm>", breakdown.OPTIMIZER),
        ("Memcpy DtoH (Device -> Pageable)", breakdown.COPIES),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
            breakdown.COPIES,
        ),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", breakdown.ELEMENTWISE),
        ("triton_poi_fused_mul_silu_0", breakdown.ELEMENTWISE),
        ("ncclDevKernel_AllGather_RING_LL", breakdown.COMMUNICATION),
    ],
)
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    found = summed(
        [event(STEP, 0, 10, DeviceType.CPU), event(name, 1, 5, DeviceType.CUDA)],
        waited=0.0,
    )
    assert found.classes[kind] == pytest.approx(4e-6)
