// The one inner kernel: a few rows of the left side times 32 columns of a packed right side, summed in float32.
//
// Right side ("group"): 32 columns. bfloat16: [depth / 32][2][16 pairs][16 columns][2], so that each 1 KB is an AMX
// tile and the whole is read in order; float32: [depth][32]. Left side: bfloat16 [rows / 16][depth / 32][16][32];
// float32 [rows][depth]. Padding is zero. Each sum runs over the depth in one order, whatever the number of rows, so a
// row's result does not depend on its neighbours.
#pragma once

#include <type_traits>

#include "simd.h"

namespace airdecode {

constexpr int kColumns = 32;    // of a group
constexpr int kBlockRows = 32;  // rows that one call works on

// What to fetch into the second-level cache while a product runs: `lines` cache lines for each tile of its depth.
struct Fetch {
  const char* from = nullptr;
  int lines = 0;
};

enum class Kernels : int { kPortable, kAvx512, kAmx };
Kernels kernels();  // the best that this CPU has, or what tests limited it to

// Sizes of the packed forms, in elements.
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t group_size(const bf16*, int64_t depth) { return ceil_div(depth, 32) * 1024; }
inline int64_t group_size(const float*, int64_t depth) { return depth * kColumns; }
inline int64_t left_size(const bf16*, int64_t rows, int64_t depth) {
  return ceil_div(rows, 16) * ceil_div(depth, 32) * 512;
}
inline int64_t left_size(const float*, int64_t rows, int64_t depth) { return rows * depth; }

// Where `row` of the left side keeps its 32 numbers from depth 32 * tile on.
template <class T>
inline T* left_at(T* left, int64_t depth, int64_t row, int64_t tile) {
  if constexpr (sizeof(T) == 4) return left + row * depth + tile * 32;
  return left + (row / 16 * ceil_div(depth, 32) + tile) * 512 + row % 16 * 32;
}

// Prepares this thread for products of up to `rows` rows. Cheap; every thread does it before its first `tile_sums`.
class TileScope {
 public:
  // `bytes`: for products of bytes, 32 deep: tiles 0 and 1 are sums, 4 is the left side, 6 and 7 are the right one.
  explicit TileScope(int64_t rows, bool bytes = false);
  ~TileScope();
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

  const Kernels kind;
};

// sums[i * stride + j] = left row `row` + i times column j, over the whole depth or a part of it.
template <class T>
struct Product {
  const T* left;
  int64_t depth;  // of the left side as it is packed
  int64_t row;    // a multiple of 16
  int rows;       // up to kBlockRows; up to 16 * ceil(rows / 16) rows of sums may be written
  const T* group;
  float* sums;
  int64_t stride = kColumns;
  Fetch fetch = {};
  // bfloat16 only: `group` holds the tiles of depth from 32 * `first_tile` on, and `add` continues earlier sums.
  int64_t first_tile = 0, tiles = ceil_div(depth, 32);
  bool add = false;
};

void tile_sums(const TileScope& scope, const Product<bf16>& product);
void tile_sums(const TileScope& scope, const Product<float>& product);

// Calls step(integral_constant<rows>, offset) for pieces of 8, 4, 2 and 1 rows.
template <class Step>
void in_pieces(int64_t rows, Step&& step) {
  int64_t done = 0;
  for (; rows - done >= 8; done += 8) step(std::integral_constant<int, 8>(), done);
  if (rows - done >= 4) step(std::integral_constant<int, 4>(), done), done += 4;
  if (rows - done >= 2) step(std::integral_constant<int, 2>(), done), done += 2;
  if (rows - done >= 1) step(std::integral_constant<int, 1>(), done);
}

// Packs x [rows, depth] with rows `stride` apart into the left side's form, rows first..last-1.
void pack_left(const bf16* x, int64_t stride, int64_t depth, int64_t first, int64_t last, bf16* left);
void pack_left(const float* x, int64_t stride, int64_t depth, int64_t first, int64_t last, bf16* left);
void pack_left(const float* x, int64_t stride, int64_t depth, int64_t first, int64_t last, float* left);

}  // namespace airdecode
