// A block of query rows meets a chunk of keys: scores, softmax kept running over chunks, weighted values.
//
// Keys and values are packed into the right-side form of tiles.h as they are read, so both products are the same inner
// kernel as the linear layers'. What no query of the block may see is never read: it is zero in the packed form.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels.h"
#include "pool.h"
#include "tiles.h"

namespace airdecode {

constexpr int64_t kChunk = 128;  // the most keys packed at once

// One step of a transposition: lanes that differ in the bit `half` change places between vectors that do.
template <int half, int... lane>
inline __attribute__((always_inline)) void exchange(u32x16* v, std::integer_sequence<int, lane...>) {
  for (int i = 0; i < 16; ++i) {
    if (i & half) continue;
    u32x16 a = v[i], b = v[i + half];
    v[i] = __builtin_shufflevector(a, b, (lane & half ? 16 + lane - half : lane)...);
    v[i + half] = __builtin_shufflevector(a, b, (lane & half ? 16 + lane : lane + half)...);
  }
}

// v[j][i] = v[i][j], sixteen by sixteen words.
inline __attribute__((always_inline)) void transpose16(u32x16* v) {
  constexpr std::make_integer_sequence<int, 16> lanes;
  exchange<8>(v, lanes);
  exchange<4>(v, lanes);
  exchange<2>(v, lanes);
  exchange<1>(v, lanes);
}

// A vector of which only `bytes` are read, the rest is zero.
template <class Vector>
[[gnu::noinline]] Vector load_tail(const void* from, int64_t bytes) {
  Vector out = {};
  std::memcpy(&out, from, bytes);
  return out;
}

template <class Vector>
inline Vector load_words(const void* from, int64_t bytes) {
  if (bytes < int64_t(sizeof(Vector))) [[unlikely]]
    return load_tail<Vector>(from, bytes);
  Vector out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

// Where one chunk of a row's keys lies in the cache, and how it is packed.
template <class T>
class ChunkKeys {
 public:
  int64_t depth;  // keys of the chunk, rounded up to whole groups

  // The row's keys from `begin` on, `size` at most. Only low..high-1 are read (counted from the row's first key); the
  // others are zero.
  ChunkKeys(const Attention<T>& op, int64_t row, int64_t begin, int64_t size, int64_t low, int64_t high) : op_(op) {
    int64_t last = std::min(high - begin, size);
    depth = ceil_div(last, kColumns) * kColumns;
    std::fill(at_, at_ + kChunk, -1);
    for (int64_t i = std::max(low - begin, int64_t(0)); i < last;) {
      int64_t logical = (begin + i) / op.block_size, offset = (begin + i) % op.block_size;
      int64_t block =
          op.block_table ? op.block_table[row * op.table_width + logical] : row * (op.blocks / op.rows) + logical;
      for (; offset < op.block_size && i < last; ++offset, ++i)
        at_[i] = (block * op.block_size + offset) * op.kv_heads * op.dim;
    }
    zeros_ = scratch<T>(kZeros, op.kv_heads * op.dim);
    std::memset(zeros_, 0, op.kv_heads * op.dim * sizeof(T));
  }

  // Brings the chunk into the second-level cache: all heads of a key lie together, and are read in turn.
  void fetch() const {
    int64_t bytes = op_.kv_heads * op_.dim * sizeof(T);
    for (const T* cache : {op_.key, op_.value})
      for (int64_t key = 0; key < depth; ++key)
        if (at_[key] >= 0)
          for (int64_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(cache + at_[key]) + i, 0, 2);
  }

  // Columns are keys, the depth is the head's dims. The chunk that will be packed next is fetched meanwhile.
  void pack_keys(int64_t head, T* groups, const ChunkKeys* next) const {
    constexpr int64_t kWords = 64 / sizeof(T);  // elements of one vector
    int64_t size = group_size(groups, op_.dim);
    for (int64_t key = 0; key < depth; key += 16) {
      T* group = groups + key / kColumns * size;
      const T *rows[16], *later[16];
      for (int i = 0; i < 16; ++i) rows[i] = row(op_.key, head, key + i), later[i] = next->row(op_.key, head, key + i);
      for (int64_t dim = 0; dim < op_.dim; dim += kWords) {
        u32x16 words[16];
        for (int i = 0; i < 16; ++i) {
          words[i] = load_words<u32x16>(rows[i] + dim, (op_.dim - dim) * sizeof(T));
          __builtin_prefetch(later[i] + dim, 0, 2);
        }
        transpose16(words);
        if constexpr (sizeof(T) == 2) {
          std::memcpy(group + (dim / 32 * 2 + key / 16 % 2) * 512, words, sizeof(words));
        } else {
          for (int64_t i = 0; i < std::min<int64_t>(16, op_.dim - dim); ++i)
            std::memcpy(group + (dim + i) * kColumns + key % kColumns, words + i, 64);
        }
      }
    }
  }

  // Columns are the head's dims, the depth is keys.
  void pack_values(int64_t head, T* groups, const ChunkKeys* next) const {
    int64_t size = group_size(groups, depth);
    for (int64_t key = 0; key < depth; key += 2) {
      const T *even = row(op_.value, head, key), *odd = row(op_.value, head, key + 1);
      const T *even_later = next->row(op_.value, head, key), *odd_later = next->row(op_.value, head, key + 1);
      for (int64_t dim = 0; dim < op_.dim; dim += 16) {
        T* group = groups + dim / kColumns * size;
        int64_t bytes = (op_.dim - dim) * sizeof(T);
        __builtin_prefetch((dim % 32 ? odd_later : even_later) + dim / 32 * 32, 0, 2);
        if constexpr (sizeof(T) == 2) {
          u32x16 both = __builtin_convertvector(load_words<u16x16>(even + dim, bytes), u32x16) |
                        __builtin_convertvector(load_words<u16x16>(odd + dim, bytes), u32x16) << 16;
          std::memcpy(group + (key / 32 * 2 + dim / 16 % 2) * 512 + key % 32 * 16, &both, 64);
        } else {
          u32x16 first = load_words<u32x16>(even + dim, bytes), second = load_words<u32x16>(odd + dim, bytes);
          std::memcpy(group + key * kColumns + dim % kColumns, &first, 64);
          std::memcpy(group + (key + 1) * kColumns + dim % kColumns, &second, 64);
        }
      }
    }
  }

  const T* row(const T* cache, int64_t head, int64_t key) const {
    return at_[key] < 0 ? zeros_ : cache + at_[key] + head * op_.dim;
  }

 private:
  const Attention<T>& op_;
  T* zeros_;
  int64_t at_[kChunk];  // element offset of each key's row, -1: not read
};

// Scores [depth] of one row become its weights, only those of keys low..high-1 not zero. Of a softmax that is taken in
// parts, `largest` and `total` follow, and `fade` is what earlier sums of the row are to be multiplied with.
template <class T>
void soften_row(float* scores, int64_t depth, int32_t low, int32_t high, float scale, T* weights, int64_t row,
                float& largest, float& total, float& fade) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 top = splat(-INFINITY);
  for (int32_t key = 0; key < depth; key += 16) {
    f32x16 score = load16(scores + key) * scale;
    if (key < low || key + 16 > high) {
      i32x16 index = lanes + key;
      score = (index >= low) & (index < high) ? score : splat(-INFINITY);
    }
    store16(scores + key, score);
    top = max16(score, top);
  }
  float before = largest, now = std::max(before, largest16(top)), base = now == -INFINITY ? 0.0f : now;
  f32x16 sum = {};
  for (int64_t key = 0; key < depth; key += 16) {
    f32x16 weight = exp16(load16(scores + key) - base);
    sum += weight;
    store16(left_at(weights, depth, row, key / 32) + key % 32, weight);
  }
  fade = std::exp(before - base);
  total = total * fade + sum16(sum);
  largest = now;
}

// Query rows of one kv head: `count` tokens times the query heads that share it. Row r is token r / repeat.
template <class T>
struct QueryBlock {
  const Attention<T>& op;
  int64_t token, count, repeat, rows, width;  // width: dims rounded up to whole groups
  T *queries, *weights;
  float *scores, *largest, *total, *fade, *out;  // [rows, kChunk], then [rows] each, then [rows, width]

  QueryBlock(const Attention<T>& op, int64_t token, int64_t count)
      : op(op), token(token), count(count), repeat(op.query_heads / op.kv_heads), rows(count * repeat) {
    width = ceil_div(op.dim, kColumns) * kColumns;
    int64_t padded = ceil_div(rows, 16) * 16;
    queries = scratch<T>(kQueries, left_size(queries, rows, op.dim));
    scores = scratch<float>(kScores, padded * (kChunk + width + 3));
    out = scores + padded * kChunk, largest = out + padded * width, total = largest + padded, fade = total + padded;
    weights = scratch<T>(kWeights, left_size(weights, rows, kChunk));
  }

  void start(int64_t head) {
    for (int64_t i = 0; i < count; ++i) {
      const T* from = op.q + ((token + i) * op.query_heads + head * repeat - i * repeat) * op.dim;
      pack_left(from, op.dim, op.dim, i * repeat, (i + 1) * repeat, queries);
    }
    std::fill(largest, largest + rows, -INFINITY);
    std::fill(total, total + rows, 0.0f);
    std::fill(out, out + rows * width, 0.0f);
  }

  void meet(const TileScope& scope, int64_t first_key, int64_t row_len, int64_t depth, const T* keys, const T* values) {
    int64_t key_size = group_size(keys, op.dim), value_size = group_size(values, depth);
    for (int64_t key = 0; key < depth; key += kColumns)
      for (int64_t row = 0; row < rows; row += kBlockRows)
        tile_sums(scope, Product<T>{.left = queries,
                                    .depth = op.dim,
                                    .row = row,
                                    .rows = int(std::min<int64_t>(kBlockRows, rows - row)),
                                    .group = keys + key / kColumns * key_size,
                                    .sums = scores + row * kChunk + key,
                                    .stride = kChunk});
    for (int64_t row = 0; row < rows; ++row) soften(row, first_key, row_len, depth);
    alignas(64) float sums[kBlockRows * kColumns];
    for (int64_t dim = 0; dim < op.dim; dim += kColumns)
      for (int64_t row = 0; row < rows; row += kBlockRows) {
        int block = int(std::min<int64_t>(kBlockRows, rows - row));
        const T* group = values + dim / kColumns * value_size;
        tile_sums(scope,
                  Product<T>{.left = weights, .depth = depth, .row = row, .rows = block, .group = group, .sums = sums});
        for (int i = 0; i < block; ++i)
          for (int j = 0; j < kColumns; j += 16) {
            float* to = out + (row + i) * width + dim + j;
            store16(to, load16(to) * fade[row + i] + load16(sums + i * kColumns + j));
          }
      }
  }

 private:
  void soften(int64_t row, int64_t first_key, int64_t row_len, int64_t depth) {
    int64_t position = op.positions[token + row / repeat];
    int32_t high = int32_t(std::min(row_len, position + 1) - first_key);
    int32_t low = op.window ? int32_t(std::max(position - op.window + 1 - first_key, int64_t(0))) : 0;
    soften_row(scores + row * kChunk, depth, low, high, op.scale, weights, row, largest[row], total[row], fade[row]);
  }
};

}  // namespace airdecode
