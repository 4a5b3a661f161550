// What an adapter adds to a linear layer, with dropout on its input: one pass over the rows each way. The mask is
// a function of a seed and of a number's place, so none of it is kept for the backward pass.
//
// S rows, I inputs, r rank. x and its gradient are bfloat16, A and its gradient float32.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"

namespace glm::of_lora {

using bf16 = at::BFloat16;

constexpr int64_t TOGETHER = 4;

// Ones where a number stays, zeros where it is dropped: 16 random bits each, two to a word.
struct Mask {
  uint32_t low, high, limit;

  Mask(int64_t seed, double share)
      : low(static_cast<uint32_t>(seed)), high(static_cast<uint32_t>(seed >> 32)),
        limit(static_cast<uint32_t>(std::lround(share * 65536))) {}

  Floats at(uint32_t row, uint32_t group) const {  // the 16 numbers from 16 * group on
    Counts x = reinterpret_cast<Counts>(COUNT) + (group << 4);
    x = (x * 0x9e3779b1u + low) ^ (row * 0x85ebca77u + high);
    x = (x ^ (x >> 16)) * 0x7feb352du + low;
    x = (x ^ (x >> 15)) * 0x846ca68bu + high;
    x ^= x >> 16;
    return (x & 0xffff) >= limit ? Floats{} + 1.0f : Floats{};
  }
};

struct Sizes {
  int64_t S, I, r;
};

Sizes sizes_of(const at::Tensor& x_SI, const at::Tensor& A_rI) {
  TORCH_CHECK(x_SI.stride(1) == 1 && x_SI.scalar_type() == at::kBFloat16);
  TORCH_CHECK(A_rI.is_contiguous() && A_rI.scalar_type() == at::kFloat && A_rI.size(1) % LANES == 0);
  return {x_SI.size(0), x_SI.size(1), A_rI.size(0)};
}

const uint16_t* bits(const at::Tensor& x) { return reinterpret_cast<const uint16_t*>(x.data_ptr<bf16>()); }

// dropout(x) A^T, before the rest is scaled up.
at::Tensor lora_down(const at::Tensor& x_SI, const at::Tensor& A_rI, int64_t seed, double share) {
  const auto [S, I, r] = sizes_of(x_SI, A_rI);
  auto down_Sr = at::empty({S, r}, x_SI.options());
  const Mask mask(seed, share);
  const float* A = A_rI.data_ptr<float>();
  const uint16_t* x = bits(x_SI);
  uint16_t* down = const_cast<uint16_t*>(bits(down_Sr));
  const int64_t stride = x_SI.stride(0);
  at::parallel_for(0, S, 16, [&](int64_t from, int64_t to) {
    std::vector<float> row(I);
    for (int64_t s = from; s < to; ++s) {
      for (int64_t i = 0; i < I; i += LANES) {
        const Floats numbers = load(x + s * stride + i);
        store(row.data() + i, share > 0 ? numbers * mask.at(s, i / LANES) : numbers);
      }
      for (int64_t k = 0; k < r; k += TOGETHER) {  // several sums at once: each waits for its last addition
        Floats totals[TOGETHER] = {};
        const int64_t here = std::min(TOGETHER, r - k);
        for (int64_t i = 0; i < I; i += LANES)
          for (int64_t t = 0; t < TOGETHER; ++t)
            totals[t] += load(row.data() + i) * load(A + std::min(k + t, r - 1) * I + i);
        for (int64_t t = 0; t < here; ++t) down[s * r + k + t] = narrow(sum(totals[t]));
      }
    }
  });
  return down_Sr;
}

// From the gradient of `down`: adds to that of x, returns that of A.
at::Tensor lora_backward(at::Tensor& grad_SI, const at::Tensor& x_SI, const at::Tensor& grad_Sr, const at::Tensor& A_rI,
                     int64_t seed, double share) {
  const auto [S, I, r] = sizes_of(x_SI, A_rI);
  TORCH_CHECK(grad_SI.is_contiguous() && grad_Sr.is_contiguous());
  const Mask mask(seed, share);
  const int64_t threads = at::get_num_threads(), each = (S + threads - 1) / threads, stride = x_SI.stride(0);
  const int64_t parts = (S + each - 1) / each;
  auto sums_prI = at::zeros({parts, r, I}, A_rI.options());
  const float* A = A_rI.data_ptr<float>();
  const uint16_t *x = bits(x_SI), *down = bits(grad_Sr);
  uint16_t* grad = const_cast<uint16_t*>(bits(grad_SI));
  at::parallel_for(0, parts, 1, [&](int64_t from, int64_t to) {
    for (int64_t part = from; part < to; ++part) {
      float* sums = sums_prI.data_ptr<float>() + part * r * I;
      std::vector<float> by(TOGETHER * r);
      const int64_t end = std::min(S, (part + 1) * each);
      for (int64_t s = part * each; s < end; s += TOGETHER) {  // several rows share what is read of A and its sums
        for (int64_t t = 0; t < TOGETHER; ++t)
          for (int64_t k = 0; k < r; ++k) by[k * TOGETHER + t] = s + t < end ? wide(down[(s + t) * r + k]) : 0.0f;
        for (int64_t i = 0; i < I; i += LANES) {
          Floats keep[TOGETHER], numbers[TOGETHER], through[TOGETHER] = {};
          for (int64_t t = 0; t < TOGETHER; ++t) {
            const int64_t row = std::min(s + t, end - 1);
            keep[t] = share > 0 ? mask.at(row, i / LANES) : Floats{} + 1.0f;
            numbers[t] = load(x + row * stride + i) * keep[t];
          }
          for (int64_t k = 0; k < r; ++k) {
            const Floats from_A = load(A + k * I + i);
            Floats total = load(sums + k * I + i);
            for (int64_t t = 0; t < TOGETHER; ++t) {
              through[t] += from_A * by[k * TOGETHER + t];
              total += numbers[t] * by[k * TOGETHER + t];
            }
            store(sums + k * I + i, total);
          }
          for (int64_t t = 0; t < std::min(TOGETHER, end - s); ++t)
            store(grad + (s + t) * I + i, load(grad + (s + t) * I + i) + through[t] * keep[t]);
        }
      }
    }
  });
  return parts == 1 ? sums_prI[0] : sums_prI.sum(0);
}

TORCH_LIBRARY_FRAGMENT(glm_accelerate, library) {
  library.def("lora_down(Tensor x, Tensor A, int seed, float share) -> Tensor");
  library.def("lora_backward(Tensor(a!) grad, Tensor x, Tensor grad_down, Tensor A, int seed, float share) -> Tensor");
}

TORCH_LIBRARY_IMPL(glm_accelerate, CPU, library) {
  library.impl("lora_down", lora_down);
  library.impl("lora_backward", lora_backward);
}

}  // namespace glm::of_lora
