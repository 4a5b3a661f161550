// Root-mean-square norms and the sums around them, in bfloat16, one pass each way. Any part may be left out:
//
//   y = x + norm(branch) * after        out = norm(y) * before
//
// S rows, H width, a multiple of 16. Weights are float32; their gradients are summed by thread, then in order.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "lanes.h"

namespace glm::of_norm {

using Given = std::optional<at::Tensor>;

// Rows of bfloat16, or nothing.
struct Rows {
  uint16_t* data = nullptr;
  int64_t stride = 0;

  explicit Rows(const Given& x) {
    if (!x.has_value()) return;
    TORCH_CHECK(x->stride(1) == 1 && x->scalar_type() == at::kBFloat16 && x->size(1) % LANES == 0);
    data = reinterpret_cast<uint16_t*>(x->data_ptr<at::BFloat16>());
    stride = x->stride(0);
  }
  explicit operator bool() const { return data != nullptr; }
  uint16_t* row(int64_t s) const { return data + s * stride; }
};

const float* numbers(const Given& x) {
  if (!x.has_value()) return nullptr;
  TORCH_CHECK(x->is_contiguous() && x->scalar_type() == at::kFloat);
  return x->data_ptr<float>();
}

float scale_of(const uint16_t* row, int64_t H, double epsilon) {
  Floats squares{};
  for (int64_t i = 0; i < H; i += LANES) {
    const Floats x = load(row + i);
    squares += x * x;
  }
  return 1 / std::sqrt(sum(squares) / static_cast<float>(H) + static_cast<float>(epsilon));
}

// (y, out, scales of the branch, scales of y). Without a branch y is x.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norms(
    const at::Tensor& x_SH, const Given& branch_SH, const Given& after_H, const Given& before_H, double epsilon) {
  const int64_t S = x_SH.size(0), H = x_SH.size(1);
  const Rows x(x_SH), branch(branch_SH);
  const float *after = numbers(after_H), *before = numbers(before_H);
  auto y_SH = branch ? at::empty({S, H}, x_SH.options()) : x_SH;
  auto out_SH = at::empty({before != nullptr ? S : 0, H}, x_SH.options());
  auto first_S = at::empty({after != nullptr ? S : 0}, x_SH.options().dtype(at::kFloat));
  auto second_S = at::empty({before != nullptr ? S : 0}, first_S.options());
  const Rows y(y_SH), out(out_SH);
  float *first = first_S.data_ptr<float>(), *second = second_S.data_ptr<float>();
  at::parallel_for(0, S, 16, [&](int64_t from, int64_t to) {
    for (int64_t s = from; s < to; ++s) {
      uint16_t* total = y.row(s);
      if (branch) {
        const uint16_t *begin = x.row(s), *added = branch.row(s);
        if (after != nullptr) first[s] = scale_of(added, H, epsilon);
        for (int64_t i = 0; i < H; i += LANES) {
          Floats one = load(added + i);
          if (after != nullptr) one *= first[s] * load(after + i);
          store(total + i, load(begin + i) + one);
        }
      }
      if (before == nullptr) continue;
      second[s] = scale_of(total, H, epsilon);
      uint16_t* normed = out.row(s);
      for (int64_t i = 0; i < H; i += LANES) store(normed + i, load(total + i) * (second[s] * load(before + i)));
    }
  });
  return {y_SH, out_SH, first_S, second_S};
}

// The backward pass of norm(x) * weight for one row: its gradient and x as float and bfloat16 rows; x's gradient is
// added into `grad_x`.
template <typename Gradient>
void norm_backward(const Gradient* grad, const uint16_t* x, const float* weight, float scale, int64_t H, float* grad_x,
                   float* grad_weight) {
  Floats along{};
  for (int64_t i = 0; i < H; i += LANES) {
    const Floats wide = load(x + i) * scale, each = load(grad + i);
    along += each * load(weight + i) * wide;
    if (grad_weight != nullptr) store(grad_weight + i, load(grad_weight + i) + each * wide);
  }
  const float mean = sum(along) / static_cast<float>(H);
  for (int64_t i = 0; i < H; i += LANES) {
    const Floats wide = load(x + i) * scale;
    store(grad_x + i, load(grad_x + i) + (load(grad + i) * load(weight + i) - wide * mean) * scale);
  }
}

void round_to(const float* from, int64_t H, uint16_t* to) {
  for (int64_t i = 0; i < H; i += LANES) store(to + i, load(from + i));
}

// The gradients of x, of the branch, of `after` and of `before`; empty where there is none.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norms_backward(
    const Given& grad_y_SH, const Given& grad_SH, const at::Tensor& y_SH, const Given& branch_SH,
    const Given& after_H, const Given& before_H, const at::Tensor& first_S, const at::Tensor& second_S,
    bool wants_after, bool wants_before) {
  const int64_t S = y_SH.size(0), H = y_SH.size(1), threads = at::get_num_threads();
  const int64_t each = std::max<int64_t>(1, (S + threads - 1) / threads), parts = (S + each - 1) / each;
  const Rows grad_y(grad_y_SH), grad(grad_SH), y(y_SH), branch(branch_SH);
  const float *after = numbers(after_H), *before = numbers(before_H);
  const float *first = first_S.data_ptr<float>(), *second = second_S.data_ptr<float>();
  auto grad_x_SH = at::empty({S, H}, y_SH.options());
  auto grad_branch_SH = at::empty({after != nullptr ? S : 0, H}, y_SH.options());
  auto grad_after_PH = at::zeros({wants_after ? parts : 0, H}, first_S.options());
  auto grad_before_PH = at::zeros({wants_before ? parts : 0, H}, first_S.options());
  const Rows grad_x(grad_x_SH), grad_branch(grad_branch_SH);
  at::parallel_for(0, parts, 1, [&](int64_t from, int64_t to) {
    std::vector<float> total(H), branch_total(H);
    for (int64_t part = from; part < to; ++part) {
      float* sum_after = wants_after ? grad_after_PH.data_ptr<float>() + part * H : nullptr;
      float* sum_before = wants_before ? grad_before_PH.data_ptr<float>() + part * H : nullptr;
      for (int64_t s = part * each; s < std::min(S, (part + 1) * each); ++s) {
        std::fill(total.begin(), total.end(), 0.0f);
        if (grad_y)
          for (int64_t i = 0; i < H; i += LANES) store(total.data() + i, load(grad_y.row(s) + i));
        if (before != nullptr && grad)
          norm_backward(grad.row(s), y.row(s), before, second[s], H, total.data(), sum_before);
        round_to(total.data(), H, grad_x.row(s));
        if (after == nullptr) continue;
        std::fill(branch_total.begin(), branch_total.end(), 0.0f);
        norm_backward(total.data(), branch.row(s), after, first[s], H, branch_total.data(), sum_after);
        round_to(branch_total.data(), H, grad_branch.row(s));
      }
    }
  });
  return {grad_x_SH, grad_branch_SH, grad_after_PH.sum(0), grad_before_PH.sum(0)};
}

TORCH_LIBRARY_FRAGMENT(glm_accelerate, library) {
  library.def(
      "norms(Tensor x, Tensor? branch, Tensor? after, Tensor? before, float epsilon) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "norms_backward(Tensor? grad_y, Tensor? grad, Tensor y, Tensor? branch, Tensor? after, Tensor? before, "
      "Tensor first, Tensor second, bool wants_after, bool wants_before) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(glm_accelerate, CPU, library) {
  library.impl("norms", norms);
  library.impl("norms_backward", norms_backward);
}

}  // namespace glm::of_norm
