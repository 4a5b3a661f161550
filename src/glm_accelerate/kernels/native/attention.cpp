// Rotary positions and causal attention of packed documents, forward and backward, in bfloat16 products (AMX or AVX-512).
//
// One task is one document and one key/value head: nothing is shared between tasks, so the result does not
// depend on how threads take them. Inside a task queries go in blocks of R rows (T tokens x G heads that share
// the key head), keys in spans of up to SPAN, a whole number of blocks of J: so products have few shapes, and
// oneDNN makes a kernel for each once.
// Scores are transposed in the backward pass (keys x rows): that is the layout in which four of its five
// products want them.
//
// S tokens in all, N query heads, K key/value heads, G = N / K, D head width, H pairs of it that turn.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "lanes.h"

namespace glm::of_attention {

using bf16 = at::BFloat16;
using at::native::cpublas::brgemm;

constexpr int64_t ROWS = 128;  // about as many rows of queries in a block
constexpr int64_t J = 64;      // keys in a block
constexpr int64_t SPAN = 512;  // keys that one product sees at most: what is between two products stays in cache
constexpr int64_t WIDE = SPAN + 16;  // of rows of 4 bytes in memory: a power of two would share few cache lines
constexpr int64_t NARROW = SPAN + 32;  // of rows of 2 bytes
constexpr float NEVER = 1e30f; // the normaliser of a row that does not exist: all its weights are 0

inline float highest_of(const float* row, int64_t count) {
  Floats tops = Floats{} - NEVER;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) tops = max(tops, load(row + i));
  float top = -NEVER;
  for (; i < count; ++i) top = std::max(top, row[i]);
  for (int64_t l = 0; l < LANES; ++l) top = std::max(top, tops[l]);
  return top;
}

struct Shape {
  int64_t G, D, H, T, R;  // R: T * G rounded up to what the products want
  float scale;
};

Shape shape_of(int64_t groups, int64_t width, int64_t turning) {
  int64_t tokens = std::max<int64_t>(1, ROWS / groups);
  return {groups, width, turning, tokens, (tokens * groups + 31) / 32 * 32, 1 / std::sqrt(float(width))};
}

// Heads of one tensor: where head n of token s begins.
struct Heads {
  uint16_t* data;
  int64_t token, head;
  uint16_t* at(int64_t s, int64_t n) const { return data + s * token + n * head; }
};

Heads heads(const at::Tensor& x_SND) {
  TORCH_CHECK(x_SND.stride(2) == 1 && x_SND.scalar_type() == at::kBFloat16);
  return {reinterpret_cast<uint16_t*>(x_SND.data_ptr<bf16>()), x_SND.stride(0), x_SND.stride(1)};
}

// Turns pairs of neighbours by (cos, sin), `back` by the negative angle.
inline void turn(const uint16_t* in, const float* turns, const Shape& s, uint16_t* out) {
  for (int64_t h = 0; h < s.H; ++h) {
    float x = wide(in[2 * h]), y = wide(in[2 * h + 1]), c = turns[2 * h], n = turns[2 * h + 1];
    out[2 * h] = narrow(x * c - y * n);
    out[2 * h + 1] = narrow(y * c + x * n);
  }
  std::memcpy(out + 2 * s.H, in + 2 * s.H, (s.D - 2 * s.H) * 2);
}

inline void turn_back(const float* in, const float* turns, const Shape& s, uint16_t* out) {
  for (int64_t h = 0; h < s.H; ++h) {
    float x = in[2 * h], y = in[2 * h + 1], c = turns[2 * h], n = turns[2 * h + 1];
    out[2 * h] = narrow(x * c + y * n);
    out[2 * h + 1] = narrow(y * c - x * n);
  }
  for (int64_t d = 2 * s.H; d < s.D; ++d) out[d] = narrow(in[d]);
}

// out[c][r] = in[r][c], `in` of rows x columns side by side; 16 rows at a time.
template <typename T>
void transpose(const T* in, int64_t rows, int64_t columns, T* out, int64_t out_width) {
  for (int64_t first = 0; first < rows; first += 16)
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = first; r < std::min(first + 16, rows); ++r) out[c * out_width + r] = in[r * columns + c];
}

// rows x D, as the right side of a product over D: pairs of columns side by side, [D/2][width][2].
void pack_columns(const uint16_t* in, int64_t rows, int64_t D, uint16_t* out, int64_t width) {
  transpose(reinterpret_cast<const uint32_t*>(in), rows, D / 2, reinterpret_cast<uint32_t*>(out), width);
}

// rows x D, as the right side of a product over rows: pairs of rows side by side, [rows/2][D][2].
void pack_rows(const uint16_t* in, int64_t rows, int64_t D, uint16_t* out) {
  auto pairs = reinterpret_cast<uint32_t*>(out);
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t d = 0; d < D; ++d)
      pairs[r / 2 * D + d] = in[r * D + d] | static_cast<uint32_t>(in[(r + 1) * D + d]) << 16;
}

struct Left {
  const uint16_t* data;
  int64_t width;  // of its rows in memory
};
using Right = Left;  // packed

// C[M x N] (+)= A[M x K] B.
inline void product(int64_t M, int64_t N, int64_t K, Left A, Right B, float* C, int64_t width, bool add) {
  brgemm(M, N, K, A.width, B.width, width, add, reinterpret_cast<const bf16*>(A.data),
         reinterpret_cast<const bf16*>(B.data), C, true);
}

// `keys` are all that the document sees, from `first_key` on: its own are the last of them.
struct Task {
  int64_t begin, length, first_key, keys, head;
  int64_t others() const { return keys - length; }
};

std::vector<Task> tasks_of(at::IntArrayRef lengths, at::IntArrayRef keys, int64_t heads) {
  TORCH_CHECK(lengths.size() == keys.size());
  std::vector<Task> tasks;
  int64_t begin = 0, first_key = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    TORCH_CHECK(keys[i] >= lengths[i]);
    for (int64_t head = 0; head < heads; ++head) tasks.push_back({begin, lengths[i], first_key, keys[i], head});
    begin += lengths[i];
    first_key += keys[i];
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](auto& a, auto& c) { return a.length * a.keys > c.length * c.keys; });
  return tasks;
}

// Runs every task once, long ones first, on all threads.
template <typename Work>
void each_task(const std::vector<Task>& tasks, const Work& work) {
  int64_t count = tasks.size(), threads = std::min<int64_t>(at::get_num_threads(), count);
#pragma omp parallel num_threads(threads)
  {
    typename Work::Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) work(tasks[i], scratch);
    at::native::cpublas::brgemm_release(true);
  }
}

// Queries (turned) or output gradients of T tokens from `first`, as R rows; rows past the end are 0.
template <typename Copy>
void gather_rows(const Shape& s, int64_t tokens, uint16_t* out_RD, const Copy& copy) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < s.G; ++g) copy(t, g, out_RD + (t * s.G + g) * s.D);
  std::memset(out_RD + tokens * s.G * s.D, 0, (s.R - tokens * s.G) * s.D * 2);
}

template <typename T>
T* sized(std::vector<T>& buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

// Copies all keys (turned) or values that a document sees, and fills up with zeros.
void lay(const Task& task, const Heads& from, const float* turns, const Shape& s, int64_t filled, uint16_t* to) {
  for (int64_t i = 0; i < task.keys; ++i) {
    const uint16_t* row = from.at(task.first_key + i, task.head);
    if (turns != nullptr)
      turn(row, turns + (task.first_key + i) * s.H * 2, s, to + i * s.D);
    else
      std::memcpy(to + i * s.D, row, s.D * 2);
  }
  std::memset(to + task.keys * s.D, 0, (filled - task.keys) * s.D * 2);
}

struct Forward {
  Shape s;
  Heads q, k, v;
  const float* turns;  // S x H x 2
  uint16_t* out;       // S x N x D
  float* norm;         // S x N: log of the sum of exponentials
  int64_t N;

  struct Scratch {
    std::vector<uint16_t> laid, keys, values, rows, weights;
    std::vector<float> scores, outputs;
    float tops[2 * ROWS], sums[2 * ROWS];
  };

  void operator()(const Task& task, Scratch& scratch) const {
    const int64_t D = s.D, R = s.R, spans = (task.keys + SPAN - 1) / SPAN;
    const int64_t filled = (task.keys + J - 1) / J * J, others = task.others();
    auto laid = sized(scratch.laid, filled * D);
    auto keys = sized(scratch.keys, spans * WIDE * D), values = sized(scratch.values, filled * D);
    lay(task, k, turns, s, filled, laid);
    for (int64_t at = 0; at < filled; at += SPAN)
      pack_columns(laid + at * D, std::min(SPAN, filled - at), D, keys + at / SPAN * WIDE * D, WIDE);
    lay(task, v, nullptr, s, filled, laid);
    pack_rows(laid, filled, D, values);
    auto rows = sized(scratch.rows, R * D), weights = sized(scratch.weights, R * NARROW);
    auto scores = sized(scratch.scores, spans * R * WIDE), outputs = sized(scratch.outputs, R * D);
    std::fill(weights, weights + R * NARROW, uint16_t{0});
    for (int64_t first = 0; first < task.length; first += s.T) {
      const int64_t tokens = std::min(s.T, task.length - first);
      const int64_t seen = (others + first + tokens + J - 1) / J * J;
      gather_rows(s, tokens, rows, [&](int64_t t, int64_t g, uint16_t* to) {
        const int64_t token = task.begin + first + t;
        turn(q.at(token, task.head * s.G + g), turns + token * s.H * 2, s, to);
      });
      for (int64_t at = 0; at < seen; at += SPAN)
        product(R, std::min(SPAN, seen - at), D, {rows, D}, {keys + at / SPAN * WIDE * D, WIDE},
                scores + at / SPAN * WIDE * R, WIDE, false);
      highest(others + first, tokens, seen, scores, scratch);
      for (int64_t at = 0; at < seen; at += SPAN) {
        const int64_t width = std::min(SPAN, seen - at);
        weigh(others + first, tokens, at, width, scores + at / SPAN * WIDE * R, scratch);
        product(R, D, width, {weights, NARROW}, {values + at * D, D}, outputs, D, at > 0);
      }
      for (int64_t r = 0; r < tokens * s.G; ++r) {
        const int64_t token = task.begin + first + r / s.G, head = task.head * s.G + r % s.G;
        const float share = 1 / scratch.sums[r];
        uint16_t* to = out + (token * N + head) * D;
        for (int64_t d = 0; d < D; ++d) to[d] = narrow(outputs[r * D + d] * share);
        norm[token * N + head] = scratch.tops[r] + std::log(scratch.sums[r]);
      }
    }
  }

  // The highest score of each row, over the keys that it sees. Here and below `first` is the first row's own key.
  void highest(int64_t first, int64_t tokens, int64_t seen, const float* scores, Scratch& scratch) const {
    for (int64_t r = 0; r < tokens * s.G; ++r) {
      float top = -NEVER;
      for (int64_t at = 0; at < seen; at += SPAN) {
        const float* row = scores + (at / SPAN * s.R + r) * WIDE;
        top = std::max(top, highest_of(row, std::min(SPAN, first + r / s.G + 1 - at)));
      }
      scratch.tops[r] = top * s.scale;
      scratch.sums[r] = 0;
    }
  }

  // Exponentials of a span's scores, and their sums.
  void weigh(int64_t first, int64_t tokens, int64_t at, int64_t width, const float* scores, Scratch& scratch) const {
    for (int64_t r = 0; r < tokens * s.G; ++r) {
      const float* row = scores + r * WIDE;
      uint16_t* weight = scratch.weights.data() + r * NARROW;
      const int32_t valid = std::clamp<int64_t>(first + r / s.G + 1 - at, 0, width);
      const int32_t end = (valid + LANES - 1) / LANES * LANES;
      const float top = scratch.tops[r];
      Floats sums{};
      for (int32_t i = 0; i < end; i += LANES) {
        Floats p = exp_negative(load(row + i) * s.scale - top);
        p = COUNT + i < valid ? p : Floats{};
        sums += p;
        store(weight + i, p);
      }
      std::memset(weight + end, 0, (width - end) * 2);
      scratch.sums[r] += sum(sums);
    }
  }
};

struct Backward {
  Shape s;
  Heads q, k, v, grad, out, dq, dk, dv;
  const float* turns;
  const float* norm;
  int64_t N;

  struct Scratch {
    std::vector<uint16_t> keys, across, values, rows, columns, pairs, grads, grad_columns, grad_pairs;
    std::vector<uint16_t> weights, score_grads, score_grad_pairs;
    std::vector<float> scores, products, norms, along, grad_query, grad_row, grad_key, grad_value;
  };

  void operator()(const Task& task, Scratch& scratch) const {
    const int64_t D = s.D, R = s.R, spans = (task.keys + SPAN - 1) / SPAN;
    const int64_t filled = (task.keys + J - 1) / J * J, others = task.others();
    auto keys = sized(scratch.keys, filled * D), values = sized(scratch.values, filled * D);
    auto across = sized(scratch.across, spans * NARROW * D);
    auto grad_key = sized(scratch.grad_key, filled * D), grad_value = sized(scratch.grad_value, filled * D);
    std::fill(grad_key, grad_key + filled * D, 0.0f);
    std::fill(grad_value, grad_value + filled * D, 0.0f);
    lay(task, k, turns, s, filled, keys);
    lay(task, v, nullptr, s, filled, values);
    for (int64_t at = 0; at < filled; at += SPAN)
      transpose(keys + at * D, std::min(SPAN, filled - at), D, across + at / SPAN * NARROW * D, NARROW);
    auto grad_query = sized(scratch.grad_query, D * R), grad_row = sized(scratch.grad_row, R * D);
    for (int64_t first = 0; first < task.length; first += s.T) {
      const int64_t tokens = std::min(s.T, task.length - first);
      const int64_t seen = (others + first + tokens + J - 1) / J * J;
      prepare(task, first, tokens, scratch);
      for (int64_t at = 0; at < seen; at += SPAN) {
        const int64_t width = std::min(SPAN, seen - at);
        score_gradients(others + first, at, width, keys + at * D, values + at * D, scratch);
        product(width, D, R, {scratch.weights.data(), R}, {scratch.grad_pairs.data(), D}, grad_value + at * D, D, true);
        product(width, D, R, {scratch.score_grads.data(), R}, {scratch.pairs.data(), D}, grad_key + at * D, D, true);
        product(D, R, width, {across + at / SPAN * NARROW * D, NARROW}, {scratch.score_grad_pairs.data(), R}, grad_query,
                R, at > 0);
      }
      transpose(grad_query, D, R, grad_row, D);
      for (int64_t r = 0; r < tokens * s.G; ++r) {
        const int64_t token = task.begin + first + r / s.G;
        turn_back(grad_row + r * D, turns + token * s.H * 2, s, dq.at(token, task.head * s.G + r % s.G));
      }
    }
    for (int64_t i = 0; i < task.keys; ++i) {
      const int64_t token = task.first_key + i;
      turn_back(grad_key + i * D, turns + token * s.H * 2, s, dk.at(token, task.head));
      uint16_t* to = dv.at(token, task.head);
      for (int64_t d = 0; d < D; ++d) to[d] = narrow(grad_value[i * D + d]);
    }
  }

  // A block of queries and of its output gradients, laid out for the products.
  void prepare(const Task& task, int64_t first, int64_t tokens, Scratch& scratch) const {
    const int64_t D = s.D, R = s.R;
    auto rows = sized(scratch.rows, R * D), grads = sized(scratch.grads, R * D);
    auto norms = sized(scratch.norms, R), along = sized(scratch.along, R);
    std::fill(norms, norms + R, NEVER);
    std::fill(along, along + R, 0.0f);
    gather_rows(s, tokens, rows, [&](int64_t t, int64_t g, uint16_t* to) {
      const int64_t token = task.begin + first + t;
      turn(q.at(token, task.head * s.G + g), turns + token * s.H * 2, s, to);
    });
    gather_rows(s, tokens, grads, [&](int64_t t, int64_t g, uint16_t* to) {
      const int64_t token = task.begin + first + t, head = task.head * s.G + g, r = t * s.G + g;
      const uint16_t *from = grad.at(token, head), *result = out.at(token, head);
      float total = 0;
      for (int64_t d = 0; d < D; ++d) total += wide(from[d]) * wide(result[d]);
      along[r] = total;
      norms[r] = norm[token * N + head];
      std::memcpy(to, from, D * 2);
    });
    pack_columns(rows, R, D, sized(scratch.columns, R * D), R);
    pack_rows(rows, R, D, sized(scratch.pairs, R * D));
    pack_columns(grads, R, D, sized(scratch.grad_columns, R * D), R);
    pack_rows(grads, R, D, sized(scratch.grad_pairs, R * D));
  }

  // Weights of a span of keys for these rows, and the gradients of their scores, both keys x rows.
  void score_gradients(int64_t first, int64_t at, int64_t width, const uint16_t* keys, const uint16_t* values,
                       Scratch& scratch) const {
    const int64_t R = s.R, D = s.D;
    auto scores = sized(scratch.scores, SPAN * R), products = sized(scratch.products, SPAN * R);
    auto weights = sized(scratch.weights, SPAN * R), score_grads = sized(scratch.score_grads, SPAN * R);
    const float *norms = scratch.norms.data(), *along = scratch.along.data();
    product(width, R, D, {keys, D}, {scratch.columns.data(), R}, scores, R, false);
    product(width, R, D, {values, D}, {scratch.grad_columns.data(), R}, products, R, false);
    for (int64_t i = 0; i < width; ++i) {
      const float *score = scores + i * R, *product = products + i * R;
      uint16_t *weight = weights + i * R, *score_grad = score_grads + i * R;
      // Rows of tokens before this key do not see it.
      const int32_t unseen = std::clamp<int64_t>((at + i - first) * s.G, 0, R);
      const int32_t begin = unseen / LANES * LANES;
      std::memset(weight, 0, begin * 2);
      std::memset(score_grad, 0, begin * 2);
      for (int32_t r = begin; r < R; r += LANES) {
        Floats p = exp_negative(load(score + r) * s.scale - load(norms + r));
        p = COUNT + r < unseen ? Floats{} : p;
        store(weight + r, p);
        store(score_grad + r, p * (load(product + r) - load(along + r)) * s.scale);
      }
    }
    pack_rows(score_grads, width, R, sized(scratch.score_grad_pairs, SPAN * R));
  }
};

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const at::Tensor& turns, at::IntArrayRef lengths,
                                           at::IntArrayRef keys) {
  // What is turned is turned by its own place alone.
  TORCH_CHECK(turns.size(1) == 0 || q.size(0) == k.size(0));
  const int64_t S = q.size(0), N = q.size(1), K = k.size(1), D = q.size(2);
  auto out = at::empty({S, N, D}, q.options());
  auto norm = at::empty({S, N}, q.options().dtype(at::kFloat));
  Forward work{shape_of(N / K, D, turns.size(1)),  heads(q), heads(k), heads(v), turns.data_ptr<float>(),
               heads(out).data, norm.data_ptr<float>(), N};
  each_task(tasks_of(lengths, keys, K), work);
  return {out, norm};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& turns, const at::Tensor& out, const at::Tensor& norm, at::IntArrayRef lengths,
    at::IntArrayRef keys) {
  const int64_t N = q.size(1), K = k.size(1), D = q.size(2);
  auto dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options());
  auto dv = at::empty(v.sizes(), v.options());
  Backward work{shape_of(N / K, D, turns.size(1)), heads(q), heads(k), heads(v), heads(grad), heads(out),
                heads(dq), heads(dk), heads(dv), turns.data_ptr<float>(), norm.data_ptr<float>(), N};
  each_task(tasks_of(lengths, keys, K), work);
  return {dq, dk, dv};
}

// Whether this torch multiplies packed bfloat16 on this processor: asked by doing it, with numbers that are exact.
bool multiplies() {
  constexpr int64_t N = 32;
  std::vector<uint16_t> a(N * N), b(N * N), packed(N * N);
  std::vector<float> c(N * N);
  for (int64_t i = 0; i < N * N; ++i) {
    a[i] = narrow(static_cast<float>(i % 7 - 3));
    b[i] = narrow(static_cast<float>(i % 5 - 2));
  }
  pack_rows(b.data(), N, N, packed.data());
  try {
    product(N, N, N, {a.data(), N}, {packed.data(), N}, c.data(), N, false);
    at::native::cpublas::brgemm_release(true);
  } catch (const std::exception&) {
    return false;
  }
  for (int64_t i = 0; i < N; ++i)
    for (int64_t j = 0; j < N; ++j) {
      float expected = 0;
      for (int64_t k = 0; k < N; ++k) expected += wide(a[i * N + k]) * wide(b[k * N + j]);
      if (c[i * N + j] != expected) return false;
    }
  return true;
}

TORCH_LIBRARY_FRAGMENT(glm_accelerate, library) {
  library.def("attention(Tensor q, Tensor k, Tensor v, Tensor turns, int[] lengths, int[] keys) -> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor turns, Tensor out, Tensor norm, "
      "int[] lengths, int[] keys) -> (Tensor, Tensor, Tensor)");
  library.def("multiplies() -> bool", multiplies);
}

TORCH_LIBRARY_IMPL(glm_accelerate, CPU, library) {
  library.impl("attention", forward);
  library.impl("attention_backward", backward);
}

}  // namespace glm::of_attention
