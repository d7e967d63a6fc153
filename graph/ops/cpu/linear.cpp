// Matrix products that read each packed weight once, in order, at the speed of memory. Threads take groups of 32
// columns: each its own contiguous run, then what others have left.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "formats.h"
#include "gate.h"
#include "kernels.h"
#include "pool.h"

namespace airdecode {
namespace {

// The left side, packed once for all groups.
template <class Left, class T>
const Left* packed(const T* x, int64_t rows, int64_t stride, int64_t depth) {
  if constexpr (sizeof(Left) == 4)
    if (stride == depth) return x;  // already in the form
  Left* left = scratch<Left>(kLhs, left_size(static_cast<Left*>(nullptr), rows, depth));
  int64_t strips = ceil_div(rows, 16);
  parallel(strips, double(rows * depth * sizeof(T)) / 8, [&](Units& units, int thread) {
    for (int64_t strip; (strip = units.take(thread)) >= 0;)
      pack_left(x, stride, depth, strip * 16, std::min(rows, strip * 16 + 16), left);
  });
  return left;
}

// finish(column group, first row, rows, sums, size) for every part of the product, sums [rows, 32]. `stacked`: two groups
// make a part, `groups` from each other, and `size` floats apart in sums. A single row takes two groups at once.
template <bool stacked, class Weight, class Finish>
void product(const typename Weight::Left* left, int64_t rows, const Weight& weight, int64_t groups, Finish&& finish) {
  const int64_t passes = ceil_div(rows, Weight::kPassRows), most = !stacked && rows == 1 ? 2 : 1;
  const int64_t size = ceil_div(std::min(rows, Weight::kPassRows), 16) * 16 * kColumns;
  parallel(groups * passes, double(weight.bytes()) / 12 * (1 + double(rows) / 64), [&](Units& units, int thread) {
    TileScope scope(rows, Weight::in_bytes(rows));
    float* sums = scratch<float>(kSums, 2 * size);
    for (int64_t unit, taken; (unit = units.take(thread, most, taken)) >= 0;) {
      const int64_t group = unit % groups, first = unit / groups * Weight::kPassRows;
      const int64_t count = std::min(rows - first, Weight::kPassRows);
      const Groups now = stacked ? Groups{group, 2, groups} : Groups{group, taken, 1, taken};
      weight.sums(scope, left, first, count, now, sums, size);
      for (int64_t i = 0; i < taken; ++i) finish(group + i, first, count, sums + i * size, size);
    }
  });
}

template <class T>
f32x16 biased(const float* sums, const T* bias, int64_t column, int64_t count) {
  f32x16 sum = load16(sums);
  return bias ? sum + load(bias + column, count) : sum;
}

template <class Weight, class T, class Out>
void product_to(const typename Weight::Left* left, int64_t rows, Weight weight, const T* bias, Out* out) {
  int64_t columns = weight.columns;
  weight.prepare(left, rows, scratch<float>(kTileSums, weight.prepared_size(rows)));
  product<false>(left, rows, weight, ceil_div(columns, kColumns),
             [&](int64_t group, int64_t row, int64_t count, const float* sums, int64_t) {
               for (int64_t i = 0; i < count; ++i)
                 for (int64_t column = group * 32; column < std::min(columns, group * 32 + 32); column += 16)
                   store(out + (row + i) * columns + column,
                         biased(sums + i * kColumns + column % 32, bias, column, columns - column), columns - column);
             });
}

}  // namespace

template <class T, class Weight, class Out>
void linear(const T* x, int64_t rows, int64_t stride, const Weight& weight, const T* bias, Out* out) {
  product_to(packed<typename Weight::Left>(x, rows, stride, weight.depth), rows, weight, bias, out);
}

template <class T, class Weight>
void gated_mlp(const T* x, int64_t rows, int64_t stride, Weight gate_up, const T* gate_up_bias, const Weight& down,
               const T* down_bias, Gate activation, T* out) {
  using Left = typename Weight::Left;
  int64_t width = gate_up.columns / 2;
  Left* hidden = scratch<Left>(kHidden, left_size(static_cast<Left*>(nullptr), rows, width));
  const Left* left = packed<Left>(x, rows, stride, gate_up.depth);
  gate_up.prepare(left, rows, scratch<float>(kTileSums, gate_up.prepared_size(rows)));
  product<true>(left, rows, gate_up, width / kColumns,
             [&](int64_t group, int64_t row, int64_t count, const float* sums, int64_t size) {
               for (int64_t i = 0; i < count; ++i)
                 for (int64_t j = 0; j < kColumns; j += 16) {
                   int64_t column = group * 32 + j;
                   f32x16 gate = biased(sums + i * kColumns + j, gate_up_bias, column, 16);
                   f32x16 up = biased(sums + size + i * kColumns + j, gate_up_bias, width + column, 16);
                   store16(left_at(hidden, width, row + i, group) + j, activation(gate, up));
                 }
             });
  product_to(static_cast<const Left*>(hidden), rows, down, down_bias, out);
}

template <class Weight, class Out>
void packed_rows(const Weight& weight, const int32_t* ids, int64_t count, Out* out) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= weight.columns)
      throw std::runtime_error("rows: id " + std::to_string(ids[i]) + " is outside the matrix");
  parallel(count, double(count * weight.depth), [&](Units& units, int thread) {
    for (int64_t i; (i = units.take(thread)) >= 0;) weight.row(ids[i], out + i * weight.depth);
  });
}

#define INSTANTIATE(T, Weight)                                                                              \
  template void linear(const T*, int64_t, int64_t, const Weight&, const T*, T*);                            \
  template void gated_mlp(const T*, int64_t, int64_t, Weight, const T*, const Weight&, const T*, Gate, T*); \
  template void packed_rows(const Weight&, const int32_t*, int64_t, T*);
INSTANTIATE(float, Plain<float>)
INSTANTIATE(float, Int8)
INSTANTIATE(float, Int4)
INSTANTIATE(bf16, Plain<bf16>)
INSTANTIATE(bf16, Int8)
INSTANTIATE(bf16, Int4)
template void linear(const bf16*, int64_t, int64_t, const Plain<bf16>&, const bf16*, float*);
template void linear(const bf16*, int64_t, int64_t, const Int8&, const bf16*, float*);
template void linear(const bf16*, int64_t, int64_t, const Int4&, const bf16*, float*);

}  // namespace airdecode
