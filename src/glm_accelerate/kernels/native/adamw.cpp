// AdamW for float32 weights in one pass over memory: gradients are read as they are, in bfloat16 or float32,
// and clipped in passing; the weights' copies in bfloat16 are written with them.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"

namespace glm::of_adamw {

constexpr int64_t CHUNK = 1 << 15;  // numbers of one thread at a time, a multiple of LANES
static_assert(CHUNK % LANES == 0);

struct Chunk {
  size_t tensor;
  int64_t first, count;
};

std::vector<Chunk> chunks_of(at::TensorList tensors) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < tensors.size(); ++i)
    for (int64_t first = 0; first < tensors[i].numel(); first += CHUNK)
      chunks.push_back({i, first, std::min(CHUNK, tensors[i].numel() - first)});
  return chunks;
}

template <typename Kind>
Kind* numbers(const at::Tensor& tensor, at::ScalarType type) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == type);
  return static_cast<Kind*>(tensor.data_ptr());
}

template <typename Kind>
double sum_of_squares(const Kind* x, int64_t count) {
  Floats total{};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Floats each = load(x + i);
    total += each * each;
  }
  Kind rest[LANES] = {};
  std::copy(x + i, x + count, rest);
  const Floats last = load(rest);
  total += last * last;
  return sum(total);
}

// Of all numbers together, the same on any number of threads.
double squares(at::TensorList gradients) {
  const auto chunks = chunks_of(gradients);
  std::vector<double> parts(chunks.size());
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t c = from; c < to; ++c) {
      const auto [i, first, count] = chunks[c];
      const at::Tensor& gradient = gradients[i];
      parts[c] = gradient.scalar_type() == at::kBFloat16
                     ? sum_of_squares(numbers<uint16_t>(gradient, at::kBFloat16) + first, count)
                     : sum_of_squares(numbers<float>(gradient, at::kFloat) + first, count);
    }
  });
  double total = 0;
  for (const double part : parts) total += part;
  return total;
}

struct Rule {
  float factor, keep, first, second, rate, correction, epsilon;  // first, second: one minus the betas
};

struct Sixteen {
  Floats weight, mean, square;
};

inline Sixteen moved(const Rule& rule, Sixteen now, Floats gradient) {
  gradient *= rule.factor;
  now.mean += (gradient - now.mean) * rule.first;
  now.square += (gradient * gradient - now.square) * rule.second;
  const Floats root = _mm512_sqrt_ps(now.square);
  now.weight = now.weight * rule.keep - now.mean * rule.rate / (root * rule.correction + rule.epsilon);
  return now;
}

template <typename Kind>
void move(const Rule& rule, int64_t count, float* weight, const Kind* gradient, float* mean, float* square,
          uint16_t* copy) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Sixteen now = moved(rule, {load(weight + i), load(mean + i), load(square + i)}, load(gradient + i));
    store(weight + i, now.weight);
    store(mean + i, now.mean);
    store(square + i, now.square);
    if (copy != nullptr) store(copy + i, now.weight);
  }
  if (i == count) return;
  float last[3][LANES] = {};
  Kind last_gradient[LANES] = {};
  uint16_t narrowed[LANES];
  float* all[3] = {weight, mean, square};
  for (int64_t part = 0; part < 3; ++part) std::copy(all[part] + i, all[part] + count, last[part]);
  std::copy(gradient + i, gradient + count, last_gradient);
  move(rule, LANES, last[0], last_gradient, last[1], last[2], narrowed);
  for (int64_t part = 0; part < 3; ++part) std::copy(last[part], last[part] + (count - i), all[part] + i);
  if (copy != nullptr) std::copy(narrowed, narrowed + (count - i), copy + i);
}

// `step` counts from one. A weight without a copy has an empty one.
void adamw(at::TensorList weights, at::TensorList gradients, at::TensorList means, at::TensorList second_moments,
           at::TensorList copies, int64_t step, double factor, double rate, double decay, double beta1, double beta2,
           double epsilon) {
  const size_t all = weights.size();
  TORCH_CHECK(gradients.size() == all && means.size() == all && second_moments.size() == all && copies.size() == all);
  const double count = static_cast<double>(step);
  const Rule rule{static_cast<float>(factor),
                  static_cast<float>(1 - rate * decay),
                  static_cast<float>(1 - beta1),
                  static_cast<float>(1 - beta2),
                  static_cast<float>(rate / (1 - std::pow(beta1, count))),
                  static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, count))),
                  static_cast<float>(epsilon)};
  const auto chunks = chunks_of(weights);
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t c = from; c < to; ++c) {
      const auto [i, first, length] = chunks[c];
      TORCH_CHECK(gradients[i].numel() == weights[i].numel());
      float* weight = numbers<float>(weights[i], at::kFloat) + first;
      float* mean = numbers<float>(means[i], at::kFloat) + first;
      float* square = numbers<float>(second_moments[i], at::kFloat) + first;
      uint16_t* copy = copies[i].numel() ? numbers<uint16_t>(copies[i], at::kBFloat16) + first : nullptr;
      if (gradients[i].scalar_type() == at::kBFloat16)
        move(rule, length, weight, numbers<uint16_t>(gradients[i], at::kBFloat16) + first, mean, square, copy);
      else
        move(rule, length, weight, numbers<float>(gradients[i], at::kFloat) + first, mean, square, copy);
    }
  });
}

TORCH_LIBRARY_FRAGMENT(glm_accelerate, library) {
  library.def("squares(Tensor[] gradients) -> float");
  library.def(
      "adamw(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] means, Tensor(c!)[] squares, Tensor(d!)[] copies, "
      "int step, float factor, float rate, float decay, float beta1, float beta2, float epsilon) -> ()");
}

TORCH_LIBRARY_IMPL(glm_accelerate, CPU, library) {
  library.impl("squares", squares);
  library.impl("adamw", adamw);
}

}  // namespace glm::of_adamw
