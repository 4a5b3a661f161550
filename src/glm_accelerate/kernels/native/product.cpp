// a b, with the rows of a shared out over threads. oneDNN computes a product that is as narrow as a model's
// width on one thread, whatever it is given; inside a parallel region it does what each of our threads asks.

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

namespace glm::of_product {

constexpr int64_t FEWEST = 192;  // rows of a thread: each lays b out anew

void multiply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  at::AutoDispatchBelowADInplaceOrView below;  // a thread of its own knows nothing of the caller's guards
  if (bias.has_value())
    at::addmm_out(out, *bias, a, b);
  else
    at::mm_out(out, a, b);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  const int64_t rows = a.size(0), threads = at::get_num_threads();
  auto out = at::empty({rows, b.size(1)}, a.options());
  if (threads == 1 || rows < threads * FEWEST) {
    multiply(out, a, b, bias);
    return out;
  }
  const int64_t each = ((rows + threads - 1) / threads + 31) / 32 * 32;
  at::parallel_for(0, (rows + each - 1) / each, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t first = i * each, count = std::min(each, rows - first);
      auto part = out.narrow(0, first, count);
      multiply(part, a.narrow(0, first, count), b, bias);
    }
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(glm_accelerate, library) {
  library.def("product(Tensor a, Tensor b, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(glm_accelerate, CPU, library) {
  library.impl("product", product);
}

}  // namespace glm::of_product
