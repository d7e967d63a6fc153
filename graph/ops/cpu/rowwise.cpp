// What is done to one token at a time: norms, the choice of a token, rotation with the cache write.
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "pool.h"

namespace airdecode {
namespace {

bool any(i32x16 mask) {
  int64_t halves[8], all = 0;
  std::memcpy(halves, &mask, sizeof(halves));
  for (int64_t half : halves) all |= half;
  return all;
}

// 1 / sqrt(mean(x^2) + eps), the sum in one fixed order.
template <class T>
float inverse_rms(const T* x, int64_t width, double eps) {
  f32x16 sum = {};
  for (int64_t i = 0; i < width; i += 16) {
    f32x16 v = load(x + i, width - i);
    sum += v * v;
  }
  return 1.0f / std::sqrt(sum16(sum) / float(width) + float(eps));
}

template <class T>
void norm(const T* x, const T* weight, int64_t width, double eps, T* out) {
  float scale = inverse_rms(x, width, eps);
  for (int64_t i = 0; i < width; i += 16)
    store(out + i, rounded<T>(load(x + i, width - i) * scale) * load(weight + i, width - i), width - i);
}

// Turns one head's first 2 * half dims. `from` may be `to`.
template <class T>
void rotate(const T* from, const float* cos, const float* sin, int64_t half, int64_t dim, bool interleaved, T* to) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      float a = get(from + 2 * i), b = get(from + 2 * i + 1);
      put(to + 2 * i, a * cos[i] - b * sin[i]);
      put(to + 2 * i + 1, b * cos[i] + a * sin[i]);
    }
  } else {
    for (int64_t i = 0; i < half; i += 16) {
      f32x16 a = load(from + i, half - i), b = load(from + half + i, half - i);
      f32x16 c = load(cos + i, half - i), s = load(sin + i, half - i);
      store(to + i, a * c - b * s, half - i);
      store(to + half + i, b * c + a * s, half - i);
    }
  }
  if (to != from) std::memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(T));
}

template <class T>
void rotate_token(const RotateAndCache<T>& op, int64_t token) {
  const T* head = op.qkv + token * (op.query_heads + 2 * op.kv_heads) * op.dim;
  const float *cos = op.cos + token * op.half, *sin = op.sin + token * op.half;
  auto turn = [&](const T* weight, T* to) {
    if (weight) norm(head, weight, op.dim, op.eps, to);
    rotate(weight ? to : head, cos, sin, op.half, op.dim, op.interleaved, to);
    head += op.dim;
  };
  for (int64_t h = 0; h < op.query_heads; ++h) turn(op.q_norm, op.out + (token * op.query_heads + h) * op.dim);
  int64_t width = op.kv_heads * op.dim, slot = op.slot_mapping[token];
  for (int64_t h = 0; h < op.kv_heads; ++h) turn(op.k_norm, op.key + slot * width + h * op.dim);
  std::memcpy(op.value + slot * width, head, width * sizeof(T));
}

}  // namespace

template <class T>
void rms_norm(const T* x, const T* residual, const T* weight, int64_t rows, int64_t width, double eps, T* out,
              T* total) {
  parallel(rows, double(rows * width) / 4, [&](Units& units, int thread) {
    for (int64_t row; (row = units.take(thread)) >= 0;) {
      const T* from = x + row * width;
      if (residual) {
        for (int64_t i = row * width; i < (row + 1) * width; i += 16) {
          int64_t count = (row + 1) * width - i;
          store(total + i, load(x + i, count) + load(residual + i, count), count);
        }
        from = total + row * width;
      }
      norm(from, weight, width, eps, out + row * width);
    }
  });
}

template <class T>
void argmax(const T* logits, int64_t rows, int64_t width, int32_t* out) {
  parallel(rows, double(rows * width) / 8, [&](Units& units, int thread) {
    for (int64_t row; (row = units.take(thread)) >= 0;) {
      const T* from = logits + row * width;
      f32x16 best = splat(-INFINITY);
      i32x16 strange = {};
      for (int64_t i = 0; i + 16 <= width; i += 16) {
        f32x16 v = load16(from + i);
        best = max16(v, best);
        strange |= v != v;
      }
      float largest = largest16(best);
      bool nan = any(strange);
      for (int64_t i = width / 16 * 16; i < width; ++i) {
        float v = get(from + i);
        nan |= v != v;
        largest = v > largest ? v : largest;
      }
      auto wanted = [&](auto v) { return nan ? v != v : v == largest; };
      int64_t at = 0;
      for (; at + 16 <= width; at += 16)
        if (any(wanted(load16(from + at)))) break;
      while (at < width && !wanted(get(from + at))) ++at;
      out[row] = int32_t(at);
    }
  });
}

template <class T>
void RotateAndCache<T>::run() const {
  int64_t width = (query_heads + 2 * kv_heads) * dim;
  for (int64_t i = 0; i < tokens; ++i)
    if (slot_mapping[i] < 0 || slot_mapping[i] >= slots)
      throw std::runtime_error("rotate_and_cache: slot " + std::to_string(slot_mapping[i]) + " is outside the cache");
  parallel(tokens, double(tokens * width) / 3, [&](Units& units, int thread) {
    for (int64_t token; (token = units.take(thread)) >= 0;) rotate_token(*this, token);
  });
}

template void rms_norm(const float*, const float*, const float*, int64_t, int64_t, double, float*, float*);
template void rms_norm(const bf16*, const bf16*, const bf16*, int64_t, int64_t, double, bf16*, bf16*);
template void argmax(const float*, int64_t, int64_t, int32_t*);
template void argmax(const bf16*, int64_t, int64_t, int32_t*);
template struct RotateAndCache<float>;
template struct RotateAndCache<bf16>;

}  // namespace airdecode
