// How a weight is kept, and the sums of any rows with 32 of its columns. All formats are read in order, once a pass.
//
// Groups of 32 columns, in tiles of 32 deep. Plain numbers as tiles.h has them; int8 as [2][8][16 columns][4 deep]; int4
// as [2][4][16 columns][4] bytes, the byte (i, j) with depth 8i+j in its low and 8i+j+4 in its high half, then for each
// column a step and for each a least value, a byte each: a number is step * half + 16 * least. Both have one float32
// scale a column beside. An int4 weight so takes 4.5 bits; float16 steps and least values would make it 5.
#pragma once

#include "tiles.h"

namespace airdecode {

// Which groups one call multiplies: `count` of them, one or two, `apart` groups from each other. `next`: from each to the
// one that this thread will read after it.
struct Groups {
  int64_t first, count = 1, apart = 1, next = 1;
};

// `sums` gives [rows, 32] for each group, `size` numbers after the other.
// `at(i)` is the i-th of equal matrices that lie one after the other. `prepare` works out, into room for
// prepared_size(rows) numbers, what `sums` needs of the left side beside its packed form.
template <class T>
struct Plain {
  using Left = T;
  static constexpr int64_t kPassRows = 256;  // rows that meet a group while it is in the caches

  const T* groups;
  int64_t columns, depth;
  const float* lone = nullptr;  // a single row of the left side, as float32

  static bool in_bytes(int64_t) { return false; }
  void prepare(const T* left, int64_t rows, float* to);
  int64_t prepared_size(int64_t rows) const { return rows == 1 ? ceil_div(depth, 32) * 32 : 0; }
  void sums(const TileScope& scope, const T* left, int64_t row, int64_t rows, const Groups& groups, float* sums,
            int64_t size) const;
  template <class Out>
  void row(int64_t column, Out* out) const;
  int64_t bytes() const { return ceil_div(columns, kColumns) * group_size(groups, depth) * int64_t(sizeof(T)); }
  Plain at(int64_t i) const { return {.groups = groups + i * bytes() / int64_t(sizeof(T)), .columns = columns, .depth = depth}; }
};

// The left side of a step of few rows as quantised weights take it: whole numbers of kBytes bytes, and a scale for each
// 32. Whole numbers are summed exactly, so that a row's result does not depend on the kernel that the number of rows asks
// for. One byte a number costs SmolLM2-135M 0.3% of perplexity, two nothing.
template <int kBytes>
struct ByteRows {
  using Total = std::conditional_t<kBytes == 2, int32_t, float>;
  static constexpr int64_t kMost = 16;  // with more rows the work, not the memory, takes the time: bfloat16 then

  int64_t rows = 0;
  const int8_t* bytes = nullptr;  // [tiles, rows, kBytes, 32]: of two, the first is worth 128 times the second
  const float* scales = nullptr;  // [rows, tiles]
  const Total* totals = nullptr;  // [rows, tiles]: the sum of a tile's whole numbers, as `sums` needs it: -128 or 16 times

  ByteRows() = default;
  ByteRows(const bf16* left, int64_t rows, int64_t depth, float* to);
  static int64_t size(int64_t rows, int64_t depth) {  // the matrix unit reads sixteen rows, whatever there are
    return rows > kMost ? 0 : rows * ceil_div(depth, 32) * (2 + 8 * kBytes) + 128;
  }
  const int8_t* at(int64_t row, int64_t tile) const { return bytes + (tile * rows + row) * kBytes * 32; }
};

// Whole numbers, and a scale for each column. With more rows than ByteRows takes, whole numbers are rounded to bfloat16.
template <class Numbers>
struct Scaled {
  using Left = bf16;
  static constexpr int64_t kPassRows = 512, kTileBytes = Numbers::kTileBytes;

  const uint8_t* groups;
  const float* scales;  // [columns, rounded up to whole groups]
  int64_t columns, depth;
  typename Numbers::Few few = {};

  static bool in_bytes(int64_t rows) { return Numbers::in_bytes(rows); }
  void prepare(const bf16* left, int64_t rows, float* to) {
    if (prepared_size(rows)) few = typename Numbers::Few(left, rows, depth, to);
  }
  int64_t prepared_size(int64_t rows) const { return Numbers::Few::size(rows, depth); }
  void sums(const TileScope& scope, const bf16* left, int64_t row, int64_t rows, const Groups& groups, float* sums,
            int64_t size) const;
  template <class Out>
  void row(int64_t column, Out* out) const;
  int64_t bytes() const { return ceil_div(columns, kColumns) * ceil_div(depth, 32) * kTileBytes; }
  Scaled at(int64_t i) const {
    int64_t outputs = ceil_div(columns, kColumns) * kColumns;
    return {.groups = groups + i * bytes(), .scales = scales + i * outputs, .columns = columns, .depth = depth};
  }
};

struct Bytes {
  using Few = ByteRows<2>;
  static constexpr int64_t kTileBytes = 1024;
  // Whether the matrix unit takes bytes: fewer rows are faster without it.
  static bool in_bytes(int64_t rows) { return rows > 4 && rows <= Few::kMost; }
  static float at(const uint8_t* tile, int64_t k, int64_t lane) {
    return int8_t(tile[((lane / 16 * 8 + k / 4) * 16 + lane % 16) * 4 + k % 4]);
  }
};

struct Nibbles {
  using Few = ByteRows<1>;  // what it costs is little beside the weights' own rounding
  static constexpr int64_t kSteps = 512, kLeast = kSteps + 32, kTileBytes = kLeast + 32;
  static bool in_bytes(int64_t) { return false; }
  static float at(const uint8_t* tile, int64_t k, int64_t lane) {
    const uint8_t both = tile[((lane / 16 * 4 + k / 8) * 16 + lane % 16) * 4 + k % 4];
    return float(tile[kSteps + lane] * (both >> k % 8 / 4 * 4 & 15) + 16 * int8_t(tile[kLeast + lane]));
  }
};

using Int8 = Scaled<Bytes>;
using Int4 = Scaled<Nibbles>;

// -- one row of the matrix, for lookups: column n of the packed form
// -----------------------------------------------------

template <class T>
template <class Out>
void Plain<T>::row(int64_t column, Out* out) const {
  const T* group = groups + column / kColumns * group_size(groups, depth);
  const int64_t lane = column % kColumns;
  for (int64_t k = 0; k < depth; ++k) {
    const int64_t in_pairs = ((k / 32 * 2 + lane / 16) * 16 + k % 32 / 2) * 32 + lane % 16 * 2 + k % 2;
    put(out + k, get(group + (sizeof(T) == 4 ? k * 32 + lane : in_pairs)));
  }
}

template <class Numbers>
template <class Out>
void Scaled<Numbers>::row(int64_t column, Out* out) const {
  const uint8_t* group = groups + column / kColumns * ceil_div(depth, 32) * kTileBytes;
  for (int64_t k = 0; k < depth; ++k)
    put(out + k, Numbers::at(group + k / 32 * kTileBytes, k % 32, column % kColumns) * scales[column]);
}

}  // namespace airdecode
