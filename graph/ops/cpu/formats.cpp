#include "formats.h"

#include <algorithm>

#include "lone.h"

namespace airdecode {
namespace {

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

inline u32x16 load_line(const void* from) {
  u32x16 words;
  std::memcpy(&words, from, 64);
  return words;
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
        const int low_bit = i % 2 * 16 + i / 2 * 4;
        u32x16 even = words >> low_bit & 15, odd = words >> (low_bit + 8) & 15;
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

// Whole numbers, to which 1.5 * 2^23 was added, as bytes.
inline void store_bytes(int8_t* to, f32x16 raised) {
#if defined(__AVX512F__)
  __m128i bytes = _mm512_cvtepi32_epi8((__m512i)raised);  // the next is scalar code
#else
  typedef int8_t i8x16 __attribute__((vector_size(16)));
  i8x16 bytes = __builtin_convertvector(bits_as<i32x16>(raised), i8x16);
#endif
  std::memcpy(to, &bytes, sizeof(bytes));
}

// to[lane] += the products of four unsigned bytes with four signed ones, in each lane.
inline i32x16 add_products(i32x16 to, u32x16 bytes, const int8_t* four) {
#if defined(__AVX512VNNI__)
  int32_t all;
  std::memcpy(&all, four, 4);
  return (i32x16)_mm512_dpbusd_epi32((__m512i)to, (__m512i)bytes, _mm512_set1_epi32(all));
#endif
  for (int i = 0; i < 4; ++i) to += (i32x16)(bytes >> (8 * i) & 255) * int32_t(four[i]);
  return to;
}

inline f32x16 as_float(i32x16 whole) { return __builtin_convertvector(whole, f32x16); }

// The products of a tile of each of kRows rows with 16 columns, from tile `at` on. words(i): the unsigned bytes of
// depths 4i..4i+3 of the columns.
template <int kRows, int kBytes, class Words>
inline __attribute__((always_inline)) void byte_tile(const ByteRows<kBytes>& few, int64_t at, int64_t tiles,
                                                     i32x16 (&sum)[kRows], Words&& words) {
  i32x16 part[kRows][kBytes] = {};
  for (int i = 0; i < 8; ++i) {
    const u32x16 columns = words(i);
    for (int row = 0; row < kRows; ++row)
      for (int byte = 0; byte < kBytes; ++byte) {
        const int8_t* four = few.bytes + ((at + row * tiles) * kBytes + byte) * 32 + i * 4;
        part[row][byte] = add_products(part[row][byte], columns, four);
      }
  }
  for (int row = 0; row < kRows; ++row) sum[row] = kBytes == 2 ? (part[row][0] << 7) + part[row][1] : part[row][0];
}

// sums [kRows, 32] of int8 columns, less their scales. The weights' bytes are raised by 128 for the instruction.
template <int kRows>
void byte_sums(const Int8& weight, int64_t row, int64_t group, float* sums) {
  const int64_t tiles = ceil_div(weight.depth, 32);
  const int8_t* from = weight.groups + group * tiles * kTile;
  const auto& few = weight.few;
  f32x16 total[kRows][2] = {};
  for (int64_t tile = 0, at = row * tiles; tile < tiles; ++tile, ++at, from += kTile)
    for (int half = 0; half < 2; ++half) {
      i32x16 sum[kRows];
      byte_tile(few, at, tiles, sum, [&](int i) {
        const int8_t* line = from + half * kTile / 2 + i * 64;
        fetch(line, 64);
        return load_line(line) ^ 0x80808080;
      });
      for (int i = 0; i < kRows; ++i)
        total[i][half] += few.scales[at + i * tiles] * as_float(sum[i] - int32_t(128 * few.totals[at + i * tiles]));
    }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) store16(sums + i * kColumns + half * 16, total[i][half]);
}

template <int kRows>
void byte_sums(const Int4& weight, int64_t row, int64_t group, float* sums) {
  const int64_t tiles = ceil_div(weight.depth, 32);
  const uint8_t* from = weight.groups + group * tiles * Int4::kRecord;
  const auto& few = weight.few;
  f32x16 total[kRows][2] = {};
  for (int64_t tile = 0, at = row * tiles; tile < tiles; ++tile, ++at, from += Int4::kRecord) {
    fetch(from + 512, 128);
    for (int half = 0; half < 2; ++half) {
      i32x16 sum[kRows];
      u32x16 both;
      byte_tile(few, at, tiles, sum, [&](int i) {
        if (i % 2) return both >> 4 & 0x0f0f0f0f;
        const uint8_t* line = from + half * 256 + i * 32;
        fetch(line, 64);
        both = load_line(line);
        return both & 0x0f0f0f0f;
      });
      const f32x16 scale = load_half(from + 512 + half * 32), least = load_half(from + 576 + half * 32);
      for (int i = 0; i < kRows; ++i)
        total[i][half] += few.scales[at + i * tiles] * (scale * as_float(sum[i]) + least * few.totals[at + i * tiles]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) store16(sums + i * kColumns + half * 16, total[i][half]);
}

}  // namespace

template <class T>
void Plain<T>::prepare(const T* left, int64_t rows, float* to) {
  if constexpr (sizeof(T) == 2)
    if (rows == 1) widen_lone(left, depth, to), lone = to;
}

template <int kBytes>
ByteRows<kBytes>::ByteRows(const bf16* left, int64_t rows, int64_t depth, float* to) {
  constexpr float kLargest = kBytes == 2 ? 127 * 128 : 127;
  const int64_t tiles = ceil_div(depth, 32);
  float *scale = to, *total = to + rows * tiles;
  int8_t* byte = reinterpret_cast<int8_t*>(total + rows * tiles);
  scales = scale, totals = total, bytes = byte;
  const f32x16 magic = splat(12582912.0f);  // adding it rounds to a whole number
  auto store_whole = [&](f32x16 raised) {
    const f32x16 whole = raised - magic, high = kBytes == 2 ? whole * (1.0f / 128) + magic : raised;
    store_bytes(byte, high);
    if (kBytes == 2) store_bytes(byte + 32, whole - (high - magic) * 128 + magic);
    byte += 16;
    return whole;
  };
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t tile = 0; tile < tiles; ++tile, byte += (kBytes - 1) * 32) {
      const bf16* from = left_at(left, depth, row, tile);
      const f32x16 a = load16(from), b = load16(from + 16);
      const float largest = largest16(max16(max16(a, -a), max16(b, -b)));
      const float inverse = largest > 0 ? kLargest / largest : 0;
      const f32x16 first = store_whole(a * inverse + magic), second = store_whole(b * inverse + magic);
      *total++ = sum16(first + second);
      *scale++ = largest / kLargest + sum16((a + b) * 0);  // not a number where one of them is none
    }
}

void Int8::prepare(const bf16* left, int64_t rows, float* to) {
  if (prepared_size(rows)) few = Few(left, rows, depth, to);
}

void Int4::prepare(const bf16* left, int64_t rows, float* to) {
  if (prepared_size(rows)) few = Few(left, rows, depth, to);
}

// With one block of rows the group is fetched a little ahead; with more, each block fetches a share of the next group.
template <class T>
void Plain<T>::sums(const TileScope& scope, const T* left, int64_t row, int64_t rows, int64_t group,
                    float* sums) const {
  if (rows == 1 && lone && scope.kind == Kernels::kAmx) return lone_sums(*this, group, sums);
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
  if (few.bytes)
    in_pieces(rows, [&](auto count, int64_t i) { byte_sums<count>(*this, row + i, group, sums + i * kColumns); });
  else
    piecewise(scope, left, depth, row, rows, sums,
              [&](int64_t first, int64_t tiles, bf16* to) { unpack(from + first * kTile, tiles, to); });
  const float* scale = scales + group * kColumns;
  for (int64_t i = 0; i < rows * kColumns; i += 16) store16(sums + i, load16(sums + i) * load16(scale + i % kColumns));
}

void Int4::sums(const TileScope& scope, const bf16* left, int64_t row, int64_t rows, int64_t group, float* sums) const {
  const uint8_t* from = groups + group * ceil_div(depth, 32) * kRecord;
  if (few.bytes)
    return in_pieces(rows, [&](auto count, int64_t i) { byte_sums<count>(*this, row + i, group, sums + i * kColumns); });
  piecewise(scope, left, depth, row, rows, sums,
            [&](int64_t first, int64_t tiles, bf16* to) { unpack_rounded(from + first * kRecord, tiles, to); });
}

}  // namespace airdecode
