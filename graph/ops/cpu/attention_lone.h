// One token's queries meet a part of its row's keys, which are read as they lie in the cache: with so few rows, packing
// them costs more than the products. Keys are the matrix unit's left side, so a lane is a query and softmax goes down
// the keys. bfloat16, head sizes that are multiples of 32, up to 16 query heads for a kv head.
#pragma once

#include "amx.h"
#include "attention_block.h"

#if AIRDECODE_AMX
namespace airdecode {

// What a part reads, in the order of reading: its keys, its values, then the keys of the part after it. All heads of a
// key lie together. Measured: lines fetched a few at a time, all the while others are worked on, come at the memory's
// speed; many at once, and the core, which has room for sixteen, stands still meanwhile.
class LoneRows {
 public:
  const int64_t heads, dim, apart, depth;  // `apart`: from a key to the next where they lie one after the other

  LoneRows(const Attention<bf16>& op, int64_t head, int64_t heads, const ChunkKeys<bf16>& now,
           const ChunkKeys<bf16>& after)
      : heads(heads), dim(op.dim), apart(op.kv_heads * op.dim), depth(now.depth) {
    for (int64_t j = 0; j < depth; ++j)
      rows_[j] = now.row(op.key, head, j), rows_[depth + j] = now.row(op.value, head, j);
    for (int64_t j = 0; j <= kAhead; ++j) rows_[2 * depth + j] = after.row(op.key, head, j);
  }

  const bf16* key(int64_t j) const { return rows_[j]; }
  const bf16* value(int64_t j) const { return rows_[depth + j]; }

  // Whether 16 keys lie one after the other.
  bool straight(int64_t j) const {
    bool whole = true;
    for (int i = 1; i < 16; ++i) whole &= rows_[j + i] == rows_[j] + i * apart;
    return whole;
  }

  // The first rows, which no part before has fetched.
  void start() const {
    Lines lines(rows_, heads * dim);
    lines.fetch(kAhead * heads * dim / 32);
  }

  // A walk along the lines to fetch. Loops work on a copy, which stays in registers.
  class Lines {
   public:
    Lines(const bf16* const* row, int64_t wide) : row_(row), at_(*row), end_(at_ + wide), wide_(wide) {}

    void fetch(int64_t count) {
      for (; count > 0; --count) {
        __builtin_prefetch(at_, 0, 2);
        if ((at_ += 32) == end_) at_ = *++row_, end_ = at_ + wide_;
      }
    }

   private:
    const bf16* const* row_;
    const bf16 *at_, *end_;
    int64_t wide_;
  };
  // A part fetches as many lines as its keys and values have, evenly over its work.
  Lines later() const { return Lines(rows_ + kAhead, heads * dim); }

 private:
  static constexpr int64_t kAhead = 64;
  const bf16* rows_[2 * kChunk + kAhead + 1];
};

// A number of heads whose queries fill the lanes.
struct LoneHeads {
  int64_t first, count, repeat;
};

// The queries of some heads as columns for keys whose heads lie together: a column is zero but in its own head.
inline void pack_queries(const bf16* from, const LoneHeads& heads, int64_t dim, bf16* to) {
  std::memset(to, 0, heads.count * dim * 32);
  for (int64_t column = 0; column < heads.count * heads.repeat; ++column)
    for (int64_t d = 0; d < dim; d += 2)
      std::memcpy(to + (column / heads.repeat * dim + d) * 16 + column * 2, from + column * dim + d, 4);
}

// scores [depth, 16] of the part's keys and the heads' queries. The sums of four tiles run side by side: each is slow.
inline void lone_scores(const LoneRows& rows, const LoneHeads& heads, const bf16* queries, LoneRows::Lines& later,
                        float* scores) {
  LoneRows::Lines lines = later;
  const int64_t wide = heads.count * rows.dim, tiles = rows.depth / 16;
  const bf16* from[4];
  int64_t apart[4];
  bf16* copy = scratch<bf16>(kQueries, 64 * wide);
  for (int64_t tile = 0; tile < 4; ++tile) {
    const int64_t j = tile * 16 % rows.depth;
    const bool straight = rows.straight(j);
    from[tile] = straight ? rows.key(j) + heads.first * rows.dim : copy + j * wide;
    apart[tile] = (straight ? rows.apart : wide) * 2;
    for (int64_t i = j; i < j + 16 && !straight; ++i)
      std::memcpy(copy + i * wide, rows.key(i) + heads.first * rows.dim, wide * 2);
  }
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t d = 0; d < wide; d += 32) {
    TILE_LOAD(6, queries + d * 16, 64);
    TILE_LOAD(4, from[0] + d, apart[0]);
    TILE_MULTIPLY(0, 4, 6);
    lines.fetch(8);
    TILE_LOAD(5, from[1] + d, apart[1]);
    TILE_MULTIPLY(1, 5, 6);
    lines.fetch(8);
    if (tiles < 4) continue;
    TILE_LOAD(4, from[2] + d, apart[2]);
    TILE_MULTIPLY(2, 4, 6);
    lines.fetch(8);
    TILE_LOAD(5, from[3] + d, apart[3]);
    TILE_MULTIPLY(3, 5, 6);
    lines.fetch(8);
  }
  later = lines;
  TILE_STORE(0, scores, 64);
  TILE_STORE(1, scores + 256, 64);
  if (tiles < 4) return;
  TILE_STORE(2, scores + 512, 64);
  TILE_STORE(3, scores + 768, 64);
}

// Scores [depth, 16] become weights, only those of keys low..high-1 not zero. `count` lines are fetched for two keys.
inline void lone_weights(const LoneRows& rows, float* scores, float scale, int64_t low, int64_t high, int64_t count,
                         LoneRows::Lines& later,
                         float (&largest)[16], float (&total)[16]) {
  LoneRows::Lines lines = later;
  f32x16 top = splat(-INFINITY), sum = {};
  for (int64_t j = 0; j < rows.depth; ++j) {
    f32x16 score = j < low || j >= high ? splat(-INFINITY) : load16(scores + j * 16) * scale;
    store16(scores + j * 16, score);
    top = max16(score, top);
  }
  const f32x16 base = top == -INFINITY ? f32x16{} : top;
  for (int64_t j = 0; j < rows.depth; j += 2) {
    f32x16 even = exp16(load16(scores + j * 16) - base), odd = exp16(load16(scores + j * 16 + 16) - base);
    sum += even, sum += odd;
    store16(scores + j * 16, even), store16(scores + j * 16 + 16, odd);
    lines.fetch(count);
  }
  later = lines;
  store16(largest, top), store16(total, sum);
}

// out[i * stride + d] += weight i times value[column + d], over 32 keys and 32 numbers, for kRows queries of one head.
template <int kRows, bool kFetch>
void mix_rows(const LoneRows& rows, int64_t j, int64_t column, const float* weights, float* out, int64_t stride,
              LoneRows::Lines& lines) {
  f32x16 sums[kRows][2] = {};
  for (int64_t i = 0; i < 32; ++i, weights += 16) {
    const u32x16 both = load_words<u32x16>(rows.value(j + i) + column, 64);
    const f32x16 even = bits_as<f32x16>(both << 16), odd = bits_as<f32x16>(both & 0xffff0000u);
    if constexpr (kFetch) lines.fetch(1);
    for (int row = 0; row < kRows; ++row) sums[row][0] += even * weights[row], sums[row][1] += odd * weights[row];
  }
  for (int row = 0; row < kRows; ++row, out += stride) {
    f32x16 a = sums[row][0], b = sums[row][1];
    f32x16 low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    f32x16 high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    store16(out, load16(out) + low), store16(out + 16, load16(out + 16) + high);
  }
}

// out [count, stride] += the shares of keys j..j+31, for some queries of one head.
inline void lone_mix(const LoneRows& rows, int64_t j, int64_t head, int64_t count, const float* weights, float* out,
                     int64_t stride, LoneRows::Lines& later) {
  LoneRows::Lines lines = later;
  for (int64_t d = 0; d < rows.dim; d += 32)
    for (int64_t row = 0; row < count;) {
      auto some = [&]<int n>(std::integral_constant<int, n>) {
        const int64_t column = head * rows.dim + d;
        float* to = out + row * stride + d;
        if (row)
          mix_rows<n, false>(rows, j, column, weights + row, to, stride, lines);
        else
          mix_rows<n, true>(rows, j, column, weights + row, to, stride, lines);
        row += n;
      };
      switch (count - row) {
        case 1: some(std::integral_constant<int, 1>()); break;
        case 2: some(std::integral_constant<int, 2>()); break;
        case 3: some(std::integral_constant<int, 3>()); break;
        case 4: some(std::integral_constant<int, 4>()); break;
        case 5: some(std::integral_constant<int, 5>()); break;
        case 6: some(std::integral_constant<int, 6>()); break;
        case 7: some(std::integral_constant<int, 7>()); break;
        default: some(std::integral_constant<int, 8>());
      }
    }
  later = lines;
}

}  // namespace airdecode
#endif
