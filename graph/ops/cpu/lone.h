// One row times 32 columns, in vectors: with few bytes of work for each byte of weight, so that memory alone sets the
// speed. The sums are bit for bit those that AMX makes of the row among others: of each tile the even and the odd depths
// by themselves, then both, then the tiles in order.
#pragma once

#include "tiles.h"

namespace airdecode {

// The row as float32, as lone_tile reads it, into `to` (32 numbers a tile).
inline void widen_lone(const bf16* left, int64_t depth, float* to) {
  for (int64_t k = 0; k < ceil_div(depth, 32) * 32; k += 16)
    store16(to + k, load16(left_at(left, depth, 0, k / 32) + k % 32));
}

// The sums over one tile. octet(half, i, w) gives the weights of depths 8i..8i+7 for columns 16 * half and on.
template <class Octet>
inline __attribute__((always_inline)) void lone_tile(const float* row, f32x16 (&sum)[2], Octet&& octet) {
  for (int half = 0; half < 2; ++half) {
    f32x16 even = {}, odd = {};
    for (int i = 0; i < 4; ++i) {
      f32x16 weights[8];
      octet(half, i, weights);
      for (int j = 0; j < 8; j += 2) {
        even += weights[j] * row[8 * i + j];
        odd += weights[j + 1] * row[8 * i + j + 1];
      }
    }
    sum[half] = even + odd;
  }
}

}  // namespace airdecode
