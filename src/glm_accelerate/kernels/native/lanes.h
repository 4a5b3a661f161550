// Sixteen numbers at a time, spelled out: compilers do not see through loops with a mask or a maximum.

#pragma once

#include <cstdint>
#include <cstring>

namespace glm {

constexpr int64_t LANES = 16;
using Floats = float __attribute__((vector_size(64)));
using Words = int32_t __attribute__((vector_size(64)));
using Counts = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

constexpr Words COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// bfloat16 is the upper half of a float.
inline Floats load(const uint16_t* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return reinterpret_cast<Floats>(__builtin_convertvector(bits, Words) << 16);
}

// To the nearest, ties to even.
inline void store(uint16_t* to, Floats x) {
  const Words bits = reinterpret_cast<Words>(x);
  const Halves halves = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

inline float wide(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline uint16_t narrow(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// e to the x, to a few units in the last place; x within -87 and 88.
inline Floats exp_within(Floats x) {
  const Floats away = Floats{} + 12582912.0f;  // adding it rounds to a whole number
  const Floats n = (x * 1.44269504f + away) - away;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * reinterpret_cast<Floats>((__builtin_convertvector(n, Words) + 127) << 23);
}

inline Floats max(Floats x, Floats y) { return x < y ? y : x; }  // x, if it is NaN
inline Floats min(Floats x, Floats y) { return y < x ? y : x; }

// exp(x) for x <= 0; nothing is smaller than exp(-87).
inline Floats exp_negative(Floats x) { return exp_within(max(min(x, Floats{}), Floats{} - 87.0f)); }

inline float sum(Floats x) {
  float total = 0;
  for (int64_t l = 0; l < LANES; ++l) total += x[l];
  return total;
}

}  // namespace glm
