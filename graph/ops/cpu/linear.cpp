// Matrix products that read each packed weight once, in order, at the speed of memory. Threads take groups of 32
// columns: each its own contiguous run, then what others have left.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "pool.h"
#include "tiles.h"

namespace airdecode {
namespace {

constexpr int64_t kPassRows = 256;  // rows that meet a group while it is in the caches

// The left side, packed once for all groups.
template <class T>
const T* packed(const T* x, int64_t rows, int64_t stride, int64_t depth) {
  if (sizeof(T) == 4 && stride == depth) return x;  // already in the form
  T* left = scratch<T>(kLhs, left_size(x, rows, depth));
  int64_t strips = ceil_div(rows, 16);
  parallel(strips, double(rows * depth * sizeof(T)) / 8, [&](Units& units, int thread) {
    for (int64_t strip; (strip = units.take(thread)) >= 0;)
      pack_left(x, stride, depth, strip * 16, std::min(rows, strip * 16 + 16), left);
  });
  return left;
}

// What to fetch during one of `blocks` blocks of rows that meet a group of `bytes`: a little ahead in it where there is
// only that block, else a share of the next group. Measured: from 4 KB ahead on, into the second-level cache only (a
// hint for the first level holds the core up), a decode step reads at the memory's full speed.
Fetch share(const void* group, int64_t bytes, int64_t block, int64_t blocks) {
  const char* from = static_cast<const char*>(group);
  if (blocks == 1) return {from + 8192, 32};
  int64_t lines = ceil_div(32, blocks);
  return {from + bytes + block * lines * (bytes / 32), int(lines)};
}

// finish(column group, first row, rows, sums) for every block of the product; `stacked` groups at a time, which lie
// `groups` apart.
template <int stacked, class T, class Finish>
void product(const T* left, int64_t rows, int64_t depth, const T* weight, int64_t groups, Finish&& finish) {
  int64_t passes = ceil_div(rows, kPassRows), size = group_size(weight, depth);
  double worth = double(groups * stacked * size * sizeof(T)) / 12 * (1 + double(rows) / 64);
  parallel(groups * passes, worth, [&](Units& units, int thread) {
    TileScope scope(rows);
    alignas(64) float sums[stacked][kBlockRows * kColumns];
    for (int64_t unit; (unit = units.take(thread)) >= 0;) {
      int64_t group = unit % groups, first = unit / groups * kPassRows, last = std::min(rows, first + kPassRows);
      for (int64_t row = first; row < last; row += kBlockRows) {
        int count = int(std::min<int64_t>(kBlockRows, last - row));
        for (int i = 0; i < stacked; ++i) {
          const T* columns = weight + (group + i * groups) * size;
          Fetch fetch =
              share(columns, size * sizeof(T), (row - first) / kBlockRows, ceil_div(last - first, kBlockRows));
          tile_sums(scope, left, depth, row, count, columns, fetch, sums[i], kColumns);
        }
        finish(group, row, count, sums);
      }
    }
  });
}

template <class T>
f32x16 biased(const float* sums, const T* bias, int64_t column, int64_t count) {
  f32x16 sum = load16(sums);
  return bias ? sum + load(bias + column, count) : sum;
}

template <class T, class Out>
void product_to(const T* left, int64_t rows, const Packed<T>& weight, Out* out) {
  int64_t columns = weight.columns;
  product<1>(left, rows, weight.depth, weight.groups, ceil_div(columns, kColumns),
             [&](int64_t group, int64_t row, int count, const auto& sums) {
               for (int64_t column = group * 32; column < std::min(columns, group * 32 + 32); column += 16)
                 for (int i = 0; i < count; ++i)
                   store(out + (row + i) * columns + column,
                         biased(sums[0] + i * kColumns + column % 32, weight.bias, column, columns - column),
                         columns - column);
             });
}

f32x16 activated(f32x16 x, Activation activation) {
  f32x16 inner = activation == Activation::kSilu ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp16(-inner));
}

}  // namespace

template <class T, class Out>
void linear(const T* x, int64_t rows, int64_t stride, const Packed<T>& weight, Out* out) {
  product_to(packed(x, rows, stride, weight.depth), rows, weight, out);
}

template <class T>
void gated_mlp(const T* x, int64_t rows, int64_t stride, const Packed<T>& gate_up, const Packed<T>& down,
               Activation activation, T* out) {
  int64_t width = gate_up.columns / 2;
  T* hidden = scratch<T>(kHidden, left_size(x, rows, width));
  product<2>(packed(x, rows, stride, gate_up.depth), rows, gate_up.depth, gate_up.groups, width / kColumns,
             [&](int64_t group, int64_t row, int count, const auto& sums) {
               for (int i = 0; i < count; ++i)
                 for (int64_t j = 0; j < kColumns; j += 16) {
                   int64_t column = group * 32 + j;
                   f32x16 gate = biased(sums[0] + i * kColumns + j, gate_up.bias, column, 16);
                   f32x16 up = biased(sums[1] + i * kColumns + j, gate_up.bias, width + column, 16);
                   store16(left_at(hidden, width, row + i, group) + j, activated(gate, activation) * up);
                 }
             });
  product_to(static_cast<const T*>(hidden), rows, down, out);
}

template <class T>
void packed_rows(const Packed<T>& weight, const int32_t* ids, int64_t count, T* out) {
  int64_t depth = weight.depth, size = group_size(weight.groups, depth);
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= weight.columns)
      throw std::runtime_error("rows: id " + std::to_string(ids[i]) + " is outside the matrix");
  parallel(count, double(count * depth), [&](Units& units, int thread) {
    for (int64_t i; (i = units.take(thread)) >= 0;) {
      const T* group = weight.groups + ids[i] / 32 * size;
      int64_t lane = ids[i] % 32;
      for (int64_t k = 0; k < depth; ++k)
        out[i * depth + k] = sizeof(T) == 4
                                 ? group[k * 32 + lane]
                                 : group[(k / 32 * 2 + lane / 16) * 512 + k % 32 / 2 * 32 + lane % 16 * 2 + k % 2];
    }
  });
}

template void linear(const float*, int64_t, int64_t, const Packed<float>&, float*);
template void linear(const bf16*, int64_t, int64_t, const Packed<bf16>&, bf16*);
template void linear(const bf16*, int64_t, int64_t, const Packed<bf16>&, float*);
template void gated_mlp(const float*, int64_t, int64_t, const Packed<float>&, const Packed<float>&, Activation, float*);
template void gated_mlp(const bf16*, int64_t, int64_t, const Packed<bf16>&, const Packed<bf16>&, Activation, bf16*);
template void packed_rows(const Packed<float>&, const int32_t*, int64_t, float*);
template void packed_rows(const Packed<bf16>&, const int32_t*, int64_t, bf16*);

}  // namespace airdecode
