// Cross-entropy of rows of bfloat16 logits, and its gradient in their place. A row stays in cache for all its passes.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace glm::of_loss {

constexpr uint16_t LOWEST = 0xff7f;  // the least that bfloat16 holds: its exponential is nothing

// work(numbers) for each sixteen of a row; the last ones are filled up, and copied back if they may change.
template <typename Work>
void each_sixteen(uint16_t* row, int64_t V, bool changes, const Work& work) {
  int64_t i = 0;
  for (; i + LANES <= V; i += LANES) work(row + i);
  if (i == V) return;
  uint16_t rest[LANES];
  std::fill(rest, rest + LANES, LOWEST);
  std::copy(row + i, row + V, rest);
  work(rest);
  if (changes) std::copy(rest, rest + (V - i), row + i);
}

// The gradient is that of `factor` times the losses.
at::Tensor loss_and_gradient(at::Tensor& logits_SV, const at::Tensor& labels_S, double factor) {
  const float times = static_cast<float>(factor);
  TORCH_CHECK(logits_SV.is_contiguous() && logits_SV.scalar_type() == at::kBFloat16);
  TORCH_CHECK(labels_S.is_contiguous() && labels_S.scalar_type() == at::kLong);
  const int64_t S = logits_SV.size(0), V = logits_SV.size(1);
  auto losses_S = at::empty({S}, logits_SV.options().dtype(at::kFloat));
  auto logits = reinterpret_cast<uint16_t*>(logits_SV.data_ptr<at::BFloat16>());
  const int64_t* labels = labels_S.data_ptr<int64_t>();
  float* losses = losses_S.data_ptr<float>();
  at::parallel_for(0, S, 4, [&](int64_t from, int64_t to) {
    for (int64_t s = from; s < to; ++s) {
      uint16_t* row = logits + s * V;
      const float chosen = wide(row[labels[s]]);
      Floats tops = Floats{} + wide(LOWEST), totals{};
      each_sixteen(row, V, false, [&](const uint16_t* x) { tops = max(tops, load(x)); });
      float top = tops[0];
      for (int64_t l = 1; l < LANES; ++l) top = std::max(top, tops[l]);
      each_sixteen(row, V, false, [&](const uint16_t* x) { totals += exp_negative(load(x) - top); });
      const float rest = std::log(sum(totals));
      losses[s] = rest - (chosen - top);
      each_sixteen(row, V, true, [&](uint16_t* x) { store(x, exp_negative(load(x) - top - rest) * times); });
      row[labels[s]] = narrow((std::exp(chosen - top - rest) - 1) * times);
    }
  });
  return losses_S;
}

TORCH_LIBRARY_FRAGMENT(glm_accelerate, library) {
  library.def("loss_and_gradient(Tensor(a!) logits, Tensor labels, float factor) -> Tensor");
}

TORCH_LIBRARY_IMPL(glm_accelerate, CPU, library) { library.impl("loss_and_gradient", loss_and_gradient); }

}  // namespace glm::of_loss
