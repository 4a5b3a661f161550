// silu(gate) * up of rows that hold gate and up side by side, forward and backward, one pass each, in bfloat16.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "lanes.h"

namespace glm::of_swiglu {

uint16_t* bits(const at::Tensor& x) { return reinterpret_cast<uint16_t*>(x.data_ptr<at::BFloat16>()); }

void check(const at::Tensor& x) { TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kBFloat16); }

inline Floats sigmoid(Floats x) {
  const Floats most = Floats{} + 87.0f;
  const Floats share = 1.0f / (1.0f + exp_within(max(min(Floats{} - x, most), Floats{} - most)));
  return x < Floats{} - most ? Floats{} : share;
}

// work(at) for each sixteen numbers of a row, the last of which may overlap those before it.
template <typename Work>
void along(int64_t width, const Work& work) {
  for (int64_t i = 0; i + LANES <= width; i += LANES) work(i);
  if (width % LANES != 0) work(width - LANES);
}

at::Tensor swiglu(const at::Tensor& gate_up_S2W) {
  check(gate_up_S2W);
  const int64_t S = gate_up_S2W.size(0), W = gate_up_S2W.size(1) / 2;
  TORCH_CHECK(W >= LANES);
  auto out_SW = at::empty({S, W}, gate_up_S2W.options());
  at::parallel_for(0, S, 8, [&](int64_t from, int64_t to) {
    for (int64_t s = from; s < to; ++s) {
      const uint16_t *gates = bits(gate_up_S2W) + s * 2 * W, *ups = gates + W;
      uint16_t* out = bits(out_SW) + s * W;
      along(W, [&](int64_t i) {
        const Floats gate = load(gates + i);
        store(out + i, gate * sigmoid(gate) * load(ups + i));
      });
    }
  });
  return out_SW;
}

at::Tensor swiglu_backward(const at::Tensor& gate_up_S2W, const at::Tensor& grad_SW) {
  check(gate_up_S2W);
  check(grad_SW);
  const int64_t S = grad_SW.size(0), W = grad_SW.size(1);
  auto grad_gate_up_S2W = at::empty({S, 2 * W}, grad_SW.options());
  at::parallel_for(0, S, 8, [&](int64_t from, int64_t to) {
    for (int64_t s = from; s < to; ++s) {
      const uint16_t *gates = bits(gate_up_S2W) + s * 2 * W, *ups = gates + W, *grads = bits(grad_SW) + s * W;
      uint16_t* out = bits(grad_gate_up_S2W) + s * 2 * W;
      along(W, [&](int64_t i) {
        const Floats gate = load(gates + i), grad = load(grads + i), share = sigmoid(gate);
        store(out + i, grad * load(ups + i) * share * (1.0f + gate * (1.0f - share)));
        store(out + W + i, grad * gate * share);
      });
    }
  });
  return grad_gate_up_S2W;
}

TORCH_LIBRARY_FRAGMENT(glm_accelerate, library) {
  library.def("swiglu(Tensor gate_up) -> Tensor");
  library.def("swiglu_backward(Tensor gate_up, Tensor grad) -> Tensor");
}

TORCH_LIBRARY_IMPL(glm_accelerate, CPU, library) {
  library.impl("swiglu", swiglu);
  library.impl("swiglu_backward", swiglu_backward);
}

}  // namespace glm::of_swiglu
