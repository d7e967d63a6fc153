// Sixteen numbers at a time, in the compiler's portable vectors: AVX-512, AVX2 or NEON, whatever the machine has.
// bfloat16 is widened exactly and narrowed to the nearest even, NaN kept.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace airdecode {

struct bf16 {
  uint16_t bits;
};

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;

template <class To, class From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline f32x16 splat(float value) { return value - f32x16{}; }

inline f32x16 widen(u16x16 half) { return bits_as<f32x16>(__builtin_convertvector(half, u32x16) << 16); }

inline u16x16 narrow(f32x16 wide) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)wide);  // one instruction; it takes subnormals for zero
#endif
  u32x16 bits = bits_as<u32x16>(wide);
  u32x16 rounded = bits + 0x7fff + ((bits >> 16) & 1);
  u32x16 quiet = bits | 0x400000;  // an infinity must not come out of a NaN
  return __builtin_convertvector((wide == wide ? rounded : quiet) >> 16, u16x16);
}

inline float widen(bf16 half) { return bits_as<float>(uint32_t(half.bits) << 16); }

inline bf16 narrow(float wide) {
  uint32_t bits = bits_as<uint32_t>(wide);
  return {uint16_t((wide == wide ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000) >> 16)};
}

// -- load and store as float32; `count` < 16 reads or writes only that many, the rest is zero
// ---------------------------
inline f32x16 load16(const float* from) {
  f32x16 out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
inline f32x16 load16(const bf16* from) {
  u16x16 out;
  std::memcpy(&out, from, sizeof(out));
  return widen(out);
}
inline void store16(float* to, f32x16 value) { std::memcpy(to, &value, sizeof(value)); }
inline void store16(bf16* to, f32x16 value) {
  u16x16 half = narrow(value);
  std::memcpy(to, &half, sizeof(half));
}
template <class T>
inline f32x16 load(const T* from, int64_t count) {
  if (count >= kLanes) return load16(from);
  T part[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = from[i];
  return load16(part);
}
template <class T>
inline void store(T* to, f32x16 value, int64_t count) {
  if (count >= kLanes) return store16(to, value);
  T part[kLanes];
  store16(part, value);
  for (int64_t i = 0; i < count; ++i) to[i] = part[i];
}
inline float get(const float* from) { return *from; }
inline float get(const bf16* from) { return widen(*from); }
inline void put(float* to, float value) { *to = value; }
inline void put(bf16* to, float value) { *to = narrow(value); }

// A float32 as the type T would hold it.
template <class T>
inline f32x16 rounded(f32x16 value) {
  if constexpr (sizeof(T) == 2) return widen(narrow(value));
  return value;
}

inline f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Folds sixteen numbers to one, always in the same order. join is called with vectors of 8 and of 4
// numbers, then with single ones.
template <class Join>
inline float fold16(f32x16 v, Join&& join) {
  typedef float f32x8 __attribute__((vector_size(32)));
  typedef float f32x4 __attribute__((vector_size(16)));
  f32x8 low, high;
  std::memcpy(&low, &v, 32), std::memcpy(&high, reinterpret_cast<const char*>(&v) + 32, 32);
  f32x8 eight = join(low, high);
  f32x4 first, second;
  std::memcpy(&first, &eight, 16), std::memcpy(&second, reinterpret_cast<const char*>(&eight) + 16, 16);
  f32x4 four = join(first, second);
  return join(join(four[0], four[2]), join(four[1], four[3]));
}
inline float sum16(f32x16 v) {
  return fold16(v, [](auto a, auto b) { return a + b; });
}
inline float largest16(f32x16 v) {
  return fold16(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x within 2 units in the last place; 0 below -87, so that a masked -inf gives exactly 0. NaN stays NaN.
inline f32x16 exp16(f32x16 x) {
  const f32x16 low = splat(-87.0f), high = splat(88.0f);
  f32x16 y = x < low ? low : x;
  y = y > high ? high : y;
  const f32x16 magic = splat(12582912.0f);  // adding it rounds to a whole number
  f32x16 whole = (y * 1.44269504f + magic) - magic;
  f32x16 r = y - whole * 0.693359375f + whole * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i32x16 power = (__builtin_convertvector(whole, i32x16) + 127) << 23;
  f32x16 out = p * bits_as<f32x16>(power);
  return x < low ? f32x16{} : out;
}

}  // namespace airdecode
