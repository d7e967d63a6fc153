#include "formats.h"

#include <algorithm>

#include "lone.h"

namespace airdecode {
namespace {

typedef uint16_t u16x32 __attribute__((vector_size(64)));

constexpr int64_t kPiece = 8;  // tiles unpacked at once: 16 KB, which stay in the first-level cache
constexpr int64_t kAhead = 8192;
constexpr int64_t kTile = 1024;  // numbers of a tile of a group: 32 deep, 32 columns

// Measured: from 4 KB ahead on, into the second-level cache only (a hint for the first level holds the core up), a
// decode step reads at the memory's full speed.
inline void fetch(const void* address, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(address) + kAhead + i, 0, 2);
}

// Bytes become bfloat16 exactly: a byte at the low end of 2^23 as float32, less that and its own offset.
void unpack(const int8_t* from, int64_t tiles, bf16* to) {
  auto number = [](u32x16 words, int byte) {
    return bits_as<u32x16>(bits_as<f32x16>((words >> (8 * byte) & 255) | 0x4b000000) - 8388736.0f);
  };
  for (int64_t tile = 0; tile < tiles; ++tile, from += kTile, to += kTile) {
    for (int64_t i = 0; i < kTile; i += 64) {
      fetch(from + i, 64);
      u32x16 words;
      std::memcpy(&words, from + i, 64);
      words ^= 0x80808080;
      for (int pair = 0; pair < 2; ++pair) {
        u32x16 row = number(words, 2 * pair) >> 16 | (number(words, 2 * pair + 1) & 0xffff0000);
        std::memcpy(to + i + pair * 32, &row, 64);
      }
    }
  }
}

// 128 + nibble as bfloat16: the nibble is the low end of a fraction whose last bit is worth 1.
void unpack_raised(const uint8_t* from, int64_t tiles, bf16* to) {
  for (int64_t tile = 0; tile < tiles; ++tile, from += Int4::kRecord, to += kTile) {
    fetch(from + 512, 128);
    for (int quad = 0; quad < 8; ++quad) {
      fetch(from + quad * 64, 64);
      u16x32 words;
      std::memcpy(&words, from + quad * 64, 64);
      for (int i = 0; i < 4; ++i) {
        u16x32 row = (words >> (4 * i) & 15) | 0x4300;
        std::memcpy(to + (quad * 4 + i) * 32, &row, 64);
      }
    }
  }
}

inline f32x16 load_half(const uint8_t* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));  // the next is scalar code
#endif
  _Float16 half[kLanes];
  std::memcpy(half, from, sizeof(half));
  f32x16 out;
  for (int i = 0; i < kLanes; ++i) out[i] = float(half[i]);
  return out;
}

// least + scale * nibble, rounded to bfloat16.
void unpack_rounded(const uint8_t* from, int64_t tiles, bf16* to) {
  for (int64_t tile = 0; tile < tiles; ++tile, from += Int4::kRecord, to += kTile) {
    fetch(from + 512, 128);
    for (int quad = 0; quad < 8; ++quad) {
      fetch(from + quad * 64, 64);
      f32x16 scale = load_half(from + 512 + quad / 4 * 32), least = load_half(from + 576 + quad / 4 * 32);
      u32x16 words;
      std::memcpy(&words, from + quad * 64, 64);
      for (int i = 0; i < 4; ++i) {
        u32x16 even = words >> (4 * i) & 15, odd = words >> (4 * i + 16) & 15;
        u16x16 low = narrow(least + scale * __builtin_convertvector(even, f32x16));
        u16x16 high = narrow(least + scale * __builtin_convertvector(odd, f32x16));
        u32x16 row = __builtin_convertvector(low, u32x16) | __builtin_convertvector(high, u32x16) << 16;
        std::memcpy(to + (quad * 4 + i) * 32, &row, 64);
      }
    }
  }
}

// sums [rows, 32] over a group that is unpacked piece by piece.
template <class Unpack>
void piecewise(const TileScope& scope, const bf16* left, int64_t depth, int64_t row, int64_t rows, float* sums,
               Unpack&& unpack) {
  alignas(64) bf16 piece[kPiece * kTile];
  for (int64_t first = 0, all = ceil_div(depth, 32); first < all; first += kPiece) {
    int64_t tiles = std::min(kPiece, all - first);
    unpack(first, tiles, piece);
    for (int64_t i = 0; i < rows; i += kBlockRows)
      tile_sums(scope, Product<bf16>{.left = left,
                                     .depth = depth,
                                     .row = row + i,
                                     .rows = int(std::min<int64_t>(kBlockRows, rows - i)),
                                     .group = piece,
                                     .sums = sums + i * kColumns,
                                     .first_tile = first,
                                     .tiles = tiles,
                                     .add = first > 0});
  }
}

// A single row over a group of `bytes` a tile; fold(tile, sum) takes the sums of each tile in order.
template <class Octet, class Fold>
void lone_group(const float* row, int64_t tiles, Octet&& octet, Fold&& fold) {
  for (int64_t tile = 0; tile < tiles; ++tile) {
    f32x16 sum[2];
    lone_tile(row + tile * 32, sum, [&](int half, int i, f32x16 (&to)[8]) { octet(tile, half, i, to); });
    fold(tile, sum);
  }
}

void lone_sums(const Plain<bf16>& weight, int64_t group, float* sums) {
  const char* from = reinterpret_cast<const char*>(weight.groups + group * group_size(weight.groups, weight.depth));
  f32x16 total[2] = {};
  lone_group(
      weight.lone, ceil_div(weight.depth, 32),
      [&](int64_t tile, int half, int i, f32x16 (&to)[8]) {
        for (int pair = 0; pair < 4; ++pair) {
          const char* line = from + tile * kTile * 2 + half * kTile + (i * 4 + pair) * 64;
          fetch(line, 64);
          u32x16 both;
          std::memcpy(&both, line, 64);
          to[2 * pair] = bits_as<f32x16>(both << 16), to[2 * pair + 1] = bits_as<f32x16>(both & 0xffff0000u);
        }
      },
      [&](int64_t, const f32x16* sum) { total[0] += sum[0], total[1] += sum[1]; });
  store16(sums, total[0]), store16(sums + 16, total[1]);
}
void lone_sums(const Plain<float>&, int64_t, float*) {}

// A byte at the low end of 2^23, or at the second lowest of 2^15, is a float32 less that and the byte's own offset.
void lone_sums(const Int8& weight, int64_t group, float* sums) {
  const int8_t* from = weight.groups + group * ceil_div(weight.depth, 32) * kTile;
  f32x16 total[2] = {};
  lone_group(
      weight.lone, ceil_div(weight.depth, 32),
      [&](int64_t tile, int half, int i, f32x16 (&to)[8]) {
        for (int quad = 0; quad < 2; ++quad) {
          const int8_t* line = from + tile * kTile + half * kTile / 2 + (2 * i + quad) * 64;
          fetch(line, 64);
          u32x16 words;
          std::memcpy(&words, line, 64);
          words ^= 0x80808080;
          for (int pair = 0; pair < 2; ++pair, words >>= 16) {
            to[4 * quad + 2 * pair] = bits_as<f32x16>((words & 0xff) | 0x4b000000) - (8388608.0f + 128);
            to[4 * quad + 2 * pair + 1] = bits_as<f32x16>((words & 0xff00) | 0x47000000) - (32768.0f + 128);
          }
        }
      },
      [&](int64_t, const f32x16* sum) { total[0] += sum[0], total[1] += sum[1]; });
  store16(sums, total[0]), store16(sums + 16, total[1]);
}

// The scales and least values of an int4 record, for 16 columns; `raised` is a product with 128 + nibble, x the sum of
// the left side's tile.
struct Grid {
  f32x16 scale, least;
  Grid(const uint8_t* record, int half)
      : scale(load_half(record + 512 + half * 32)), least(load_half(record + 576 + half * 32)) {}
  f32x16 add(f32x16 to, f32x16 raised, float x) const { return to + scale * (raised - 128 * x) + least * x; }
};

void lone_sums(const Int4& weight, int64_t group, float* sums) {
  const uint8_t* from = weight.groups + group * ceil_div(weight.depth, 32) * Int4::kRecord;
  f32x16 total[2] = {};
  lone_group(
      weight.lone, ceil_div(weight.depth, 32),
      [&](int64_t tile, int half, int i, f32x16 (&to)[8]) {
        const uint8_t* line = from + tile * Int4::kRecord + (half * 4 + i) * 64;
        fetch(line, 64);
        u32x16 words;
        std::memcpy(&words, line, 64);
        for (int pair = 0; pair < 4; ++pair) {
          u32x16 even = pair == 0 ? words << 16 : pair == 1 ? words << 12 : pair == 2 ? words << 8 : words << 4;
          to[2 * pair] = bits_as<f32x16>((even & 0xf0000) | 0x43000000);
          to[2 * pair + 1] = bits_as<f32x16>((words >> (4 * pair) & 0xf0000) | 0x43000000);
        }
      },
      [&](int64_t tile, const f32x16* sum) {
        const uint8_t* record = from + tile * Int4::kRecord;
        fetch(record + 512, 128);
        for (int half = 0; half < 2; ++half)
          total[half] = Grid(record, half).add(total[half], sum[half], weight.left_sums[tile]);
      });
  store16(sums, total[0]), store16(sums + 16, total[1]);
}

// Whether one row takes the way of lone.h: there it equals the other.
template <class Weight>
bool alone(const TileScope& scope, const Weight& weight, int64_t rows) {
  return rows == 1 && weight.lone && scope.kind == Kernels::kAmx;
}

}  // namespace

template <class T>
void Plain<T>::prepare(const T* left, int64_t rows, float* to) {
  if constexpr (sizeof(T) == 2)
    if (rows == 1) widen_lone(left, depth, to), lone = to;
}

void Int8::prepare(const bf16* left, int64_t rows, float* to) {
  if (rows == 1) widen_lone(left, depth, to), lone = to;
}

// With one block of rows the group is fetched a little ahead; with more, each block fetches a share of the next group.
template <class T>
void Plain<T>::sums(const TileScope& scope, const T* left, int64_t row, int64_t rows, int64_t group,
                    float* sums) const {
  if (alone(scope, *this, rows)) return lone_sums(*this, group, sums);
  int64_t size = group_size(groups, depth), bytes = size * int64_t(sizeof(T)), blocks = ceil_div(rows, kBlockRows);
  const T* from = groups + group * size;
  int64_t lines = ceil_div(32, blocks);
  for (int64_t i = 0; i < blocks; ++i) {
    const char* next = reinterpret_cast<const char*>(from) + (blocks == 1 ? kAhead : bytes + i * lines * (bytes / 32));
    tile_sums(scope, Product<T>{.left = left,
                                .depth = depth,
                                .row = row + i * kBlockRows,
                                .rows = int(std::min<int64_t>(kBlockRows, rows - i * kBlockRows)),
                                .group = from,
                                .sums = sums + i * kBlockRows * kColumns,
                                .fetch = {next, int(lines)}});
  }
}
template struct Plain<float>;
template struct Plain<bf16>;

void Int8::sums(const TileScope& scope, const bf16* left, int64_t row, int64_t rows, int64_t group, float* sums) const {
  const int8_t* from = groups + group * ceil_div(depth, 32) * kTile;
  if (alone(scope, *this, rows))
    lone_sums(*this, group, sums);
  else
    piecewise(scope, left, depth, row, rows, sums,
              [&](int64_t first, int64_t tiles, bf16* to) { unpack(from + first * kTile, tiles, to); });
  const float* scale = scales + group * kColumns;
  for (int64_t i = 0; i < rows * kColumns; i += 16) store16(sums + i, load16(sums + i) * load16(scale + i % kColumns));
}

void Int4::prepare(const bf16* left, int64_t rows, float* to) {
  int64_t tiles = ceil_div(depth, 32);
  if (!prepared_size(rows)) return;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const bf16* from = left_at(left, depth, row, tile);
      to[row * tiles + tile] = sum16(load16(from) + load16(from + 16));
    }
  left_sums = to;
  if (rows == 1) widen_lone(left, depth, to + tiles), lone = to + tiles;
}

void Int4::sums(const TileScope& scope, const bf16* left, int64_t row, int64_t rows, int64_t group, float* sums) const {
  if (alone(scope, *this, rows)) return lone_sums(*this, group, sums);
  int64_t all = ceil_div(depth, 32);
  const uint8_t* from = groups + group * all * kRecord;
  if (!left_sums)
    return piecewise(scope, left, depth, row, rows, sums, [&](int64_t first, int64_t tiles, bf16* to) {
      unpack_rounded(from + first * kRecord, tiles, to);
    });
  alignas(64) bf16 piece[kPiece * kTile];
  alignas(64) float apart[kPiece * kExactRows * kColumns];  // of each tile, less its scale
  std::fill(sums, sums + rows * kColumns, 0.0f);
  int64_t size = ceil_div(rows, 16) * 16 * kColumns;
  for (int64_t first = 0; first < all; first += kPiece) {
    int64_t tiles = std::min(kPiece, all - first);
    unpack_raised(from + first * kRecord, tiles, piece);
    tile_sums(scope, Product<bf16>{.left = left,
                                   .depth = depth,
                                   .row = row,
                                   .rows = int(rows),
                                   .group = piece,
                                   .sums = apart,
                                   .first_tile = first,
                                   .tiles = tiles,
                                   .apart = true});
    for (int64_t tile = first; tile < first + tiles; ++tile) {
      const uint8_t* record = from + tile * kRecord;
      const float* raised = apart + (tile - first) * size;
      for (int half = 0; half < 2; ++half) {
        const Grid grid(record, half);
        for (int64_t i = 0; i < rows; ++i) {
          float* to = sums + i * kColumns + half * 16;
          f32x16 part = load16(raised + i * kColumns + half * 16);
          store16(to, grid.add(load16(to), part, left_sums[(row + i) * all + tile]));
        }
      }
    }
  }
}

}  // namespace airdecode
