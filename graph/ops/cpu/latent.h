// The kernels of latent attention (MLA): every token has one key, [latent, rotated], that all heads share, and its
// latent part is also the value. They know nothing of torch. T is float or bf16.
#pragma once

#include <algorithm>

#include "attention_block.h"

namespace airdecode {

// The rows of a step and where their tokens lie in one cache group.
struct Rows {
  int64_t tokens, rows, blocks, block_size;
  const int32_t *positions, *q_cu_len, *kv_len;
  const int32_t* block_table;  // [rows, table_width], or null: row b owns blocks b * (blocks / rows) and on
  int64_t table_width;

  int64_t capacity() const { return (block_table ? table_width : blocks / rows) * block_size; }

  int64_t slot(int64_t row, int64_t position) const {
    uint32_t logical = uint32_t(position) / uint32_t(block_size), offset = uint32_t(position) % uint32_t(block_size);
    return (block_table ? block_table[row * table_width + logical] : row * (blocks / rows) + logical) * block_size +
           offset;
  }

  // Calls body(row, first token, end) for each row; refuses lengths that the inputs cannot hold.
  template <class Body>
  void each(Body&& body) const {
    for (int64_t row = 0, token = 0; row < rows; token = q_cu_len[row++]) {
      if (q_cu_len[row] < token || q_cu_len[row] > tokens)
        throw std::runtime_error("latent attention: q_cu_len does not rise up to T");
      if (q_cu_len[row] > token && kv_len[row] > capacity())
        throw std::runtime_error("latent attention: kv_len is more than the row's blocks hold");
      body(row, token, int64_t(q_cu_len[row]));
    }
  }
  int64_t seen(int64_t row, int64_t token) const { return std::min(positions[token] + 1, kv_len[row]); }
};

// See Ops.latent_attention. Reads keys that a query can see, and nothing else of cache and table.
template <class T>
struct LatentAttention {
  const T *q, *q_rotated;     // [tokens, heads, rank], [tokens, heads, rope]
  const T *latent, *rotated;  // [blocks, block_size, rank], [blocks, block_size, rope]
  int64_t heads, rank, rope;
  Rows step;
  const int32_t* selected;  // [tokens, top] distinct positions, below 0 for none; or null
  int64_t top;
  float scale;
  T* out;  // [tokens, heads, rank]

  void run() const;
};

// See Ops.select; a token's positions come out in rising order.
template <class T>
struct LatentSelect {
  const T* q;                 // [tokens, heads, dim]
  const float* head_weights;  // [tokens, heads]
  const T* key;               // [blocks, block_size, dim]
  int64_t heads, dim, top;
  Rows step;
  int32_t* out;  // [tokens, top]

  void run() const;
};

// out [tokens, heads, columns]: one packed matrix a head.
template <class T>
struct HeadLinear {
  const T* x;  // [tokens, heads, depth]
  int64_t tokens, heads, depth, columns, token_stride, head_stride;
  const T* groups;  // of each head in turn
  T* out;

  void run() const;
};

// Up to kChunk keys of one row: positions first..end-1, or what a list holds at first..end-1.
class KeyChunk {
 public:
  int64_t depth;  // keys, rounded up to whole groups

  KeyChunk(const Rows& step, int64_t row, const int32_t* list, int64_t first, int64_t end)
      : depth(ceil_div(end - first, kColumns) * kColumns) {
    std::fill(at_ + (end - first), at_ + depth, -1);
    for (int64_t i = first; i < end; ++i) at_[i - first] = step.slot(row, list ? list[i] : i);
  }

  // Columns are keys, the depth is `dim` numbers of a cache, which take whole tiles from `first_tile` on.
  template <class T>
  void pack_keys(const T* cache, int64_t dim, int64_t first_tile, int64_t tiles, const T* zeros, T* groups) const {
    constexpr int64_t kWords = 64 / sizeof(T);  // elements of one vector
    for (int64_t key = 0; key < depth; key += 16) {
      T* group = groups + key / kColumns * group_size(groups, tiles * 32);
      const T* rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = row(cache, dim, zeros, key + i);
      for (int64_t at = 0; at < ceil_div(dim, 32) * 32; at += kWords) {
        u32x16 words[16];
        int64_t bytes = std::max<int64_t>(dim - at, 0) * int64_t(sizeof(T));
        for (int i = 0; i < 16; ++i) words[i] = load_words<u32x16>(rows[i] + at, bytes);
        transpose16(words);
        if constexpr (sizeof(T) == 2) {
          std::memcpy(group + ((first_tile + at / 32) * 2 + key / 16 % 2) * 512, words, sizeof(words));
        } else {
          for (int64_t i = 0; i < 16; ++i)
            std::memcpy(group + (first_tile * 32 + at + i) * kColumns + key % kColumns, words + i, 64);
        }
      }
    }
  }

  // Columns are `dim` numbers of a cache, the depth is keys.
  template <class T>
  void pack_values(const T* cache, int64_t dim, const T* zeros, T* groups) const {
    int64_t size = group_size(groups, depth);
    for (int64_t key = 0; key < depth; key += 2) {
      const T *even = row(cache, dim, zeros, key), *odd = row(cache, dim, zeros, key + 1);
      for (int64_t at = 0; at < dim; at += 16) {
        T* group = groups + at / kColumns * size;
        int64_t bytes = (dim - at) * int64_t(sizeof(T));
        if constexpr (sizeof(T) == 2) {
          u32x16 both = __builtin_convertvector(load_words<u16x16>(even + at, bytes), u32x16) |
                        __builtin_convertvector(load_words<u16x16>(odd + at, bytes), u32x16) << 16;
          std::memcpy(group + (key / 32 * 2 + at / 16 % 2) * 512 + key % 32 * 16, &both, 64);
        } else {
          u32x16 first = load_words<u32x16>(even + at, bytes), second = load_words<u32x16>(odd + at, bytes);
          std::memcpy(group + key * kColumns + at % kColumns, &first, 64);
          std::memcpy(group + (key + 1) * kColumns + at % kColumns, &second, 64);
        }
      }
    }
  }

  // Fetches the rows of a cache that will be packed next.
  template <class T>
  void fetch(const T* cache, int64_t dim) const {
    for (int64_t key = 0; key < depth && at_[key] >= 0; ++key)
      for (int64_t at = 0; at < dim; at += 64 / int64_t(sizeof(T)))
        __builtin_prefetch(cache + at_[key] * dim + at, 0, 2);
  }

 private:
  template <class T>
  const T* row(const T* cache, int64_t dim, const T* zeros, int64_t key) const {
    return at_[key] < 0 ? zeros : cache + at_[key] * dim;
  }

  int64_t at_[kChunk];  // slot of each key, -1: none
};

template <class T>
const T* zeros_of(int64_t count) {
  T* zeros = scratch<T>(kZeros, count);
  std::memset(zeros, 0, count * sizeof(T));
  return zeros;
}

// Packs x [rows, dim], rows `stride` apart, as tiles `first_tile`.. of a left side of `tiles` tiles.
template <class T>
void pack_tiles(const T* x, int64_t stride, int64_t dim, int64_t rows, int64_t first_tile, int64_t tiles, T* left) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t at = 0; at < dim; at += 32) {
      T* to = left_at(left, tiles * 32, row, first_tile + at / 32);
      int64_t count = std::min<int64_t>(32, dim - at);
      if (count < 32) std::memset(to, 0, 32 * sizeof(T));
      std::memcpy(to, x + row * stride + at, count * sizeof(T));
    }
}

}  // namespace airdecode
