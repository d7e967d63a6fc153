#include "formats.h"

#include <algorithm>

#include "amx.h"

namespace airdecode {
namespace {

constexpr int64_t kPiece = 8;    // tiles unpacked at once: 16 KB, which stay in the first-level cache
constexpr int64_t kTile = 1024;  // numbers of a tile of a group: 32 deep, 32 columns

// What one row reads: one run of addresses, or two side by side. Measured on two cores: two runs, each fetched 4 KB ahead
// into the second-level cache only (a hint for the first level holds the core up), bring 35 GB/s where one brings 28.
constexpr int64_t kAhead = 4096;

inline void fetch(const void* address, int64_t bytes = 64) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(address) + i, 0, 2);
}

template <int kRuns>
class Runs {
 public:
  const char* from[kRuns];

  Runs(const void* weight, int64_t bytes, const Groups& groups) : bytes_(bytes), skip_((groups.next - 1) * bytes) {
    for (int i = 0; i < kRuns; ++i)
      from[i] = static_cast<const char*>(weight) + (groups.first + i * groups.apart) * bytes;
  }
  // How far from the byte `at` of a group the one lies that should be fetched now.
  int64_t ahead(int64_t at) const { return kAhead + (at + kAhead < bytes_ ? 0 : skip_); }

 private:
  int64_t bytes_, skip_;
};

inline u32x16 load_line(const void* from) {
  u32x16 words;
  std::memcpy(&words, from, 64);
  return words;
}

// Sixteen bytes, signed or not, as float32.
template <class Byte>
inline f32x16 load_bytes(const void* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));  // the next is scalar code
  return (f32x16)_mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#endif
  f32x16 out;
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<const Byte*>(from)[i];
  return out;
}

// Whole numbers as bfloat16, `tiles` tiles. Bytes become it exactly: a byte at the low end of 2^23 as float32, less that
// and its own offset.
void unpack(Bytes, const uint8_t* from, int64_t tiles, bf16* to) {
  auto number = [](u32x16 words, int byte) {
    return bits_as<u32x16>(bits_as<f32x16>((words >> (8 * byte) & 255) | 0x4b000000) - 8388736.0f);
  };
  for (int64_t tile = 0; tile < tiles; ++tile, from += kTile, to += kTile) {
    for (int64_t i = 0; i < kTile; i += 64) {
      fetch(from + i + kAhead);
      const u32x16 words = load_line(from + i) ^ 0x80808080;
      for (int pair = 0; pair < 2; ++pair) {
        u32x16 row = number(words, 2 * pair) >> 16 | (number(words, 2 * pair + 1) & 0xffff0000);
        std::memcpy(to + i + pair * 32, &row, 64);
      }
    }
  }
}

void unpack(Nibbles, const uint8_t* from, int64_t tiles, bf16* to) {
  for (int64_t tile = 0; tile < tiles; ++tile, from += Nibbles::kTileBytes, to += kTile) {
    fetch(from + kAhead, Nibbles::kTileBytes);
    for (int quad = 0; quad < 8; ++quad) {
      const u32x16 words = load_line(from + quad * 64);
      const f32x16 step = load_bytes<uint8_t>(from + Nibbles::kSteps + quad / 4 * 16);
      const f32x16 least = load_bytes<int8_t>(from + Nibbles::kLeast + quad / 4 * 16) * 16;
      for (int i = 0; i < 4; ++i) {
        const int low_bit = i % 2 * 16 + i / 2 * 4;
        u32x16 even = words >> low_bit & 15, odd = words >> (low_bit + 8) & 15;
        u16x16 low = narrow(least + step * __builtin_convertvector(even, f32x16));
        u16x16 high = narrow(least + step * __builtin_convertvector(odd, f32x16));
        u32x16 row = __builtin_convertvector(low, u32x16) | __builtin_convertvector(high, u32x16) << 16;
        std::memcpy(to + (quad * 4 + i) * 32, &row, 64);
      }
    }
  }
}

// Calls body(group, its sums) for one or two groups.
template <class Body>
void each_group(const Groups& groups, float* sums, int64_t size, Body&& body) {
  for (int64_t i = 0; i < groups.count; ++i) body(Groups{groups.first + i * groups.apart}, sums + i * size);
}

// sums [rows, 32] over a group that is unpacked piece by piece.
template <class Numbers>
void piecewise(const TileScope& scope, const bf16* left, const Scaled<Numbers>& weight, int64_t row, int64_t rows,
               int64_t group, float* sums) {
  alignas(64) bf16 piece[kPiece * kTile];
  const int64_t all = ceil_div(weight.depth, 32);
  const uint8_t* from = weight.groups + group * all * Numbers::kTileBytes;
  for (int64_t first = 0; first < all; first += kPiece) {
    int64_t tiles = std::min(kPiece, all - first);
    unpack(Numbers(), from + first * Numbers::kTileBytes, tiles, piece);
    for (int64_t i = 0; i < rows; i += kBlockRows)
      tile_sums(scope, Product<bf16>{.left = left,
                                     .depth = weight.depth,
                                     .row = row + i,
                                     .rows = int(std::min<int64_t>(kBlockRows, rows - i)),
                                     .group = piece,
                                     .sums = sums + i * kColumns,
                                     .first_tile = first,
                                     .tiles = tiles,
                                     .add = first > 0});
  }
}

template <int kRuns, int kRows>
void store_totals(const f32x16 (&total)[kRuns][kRows][2], float* sums, int64_t size) {
  for (int run = 0; run < kRuns; ++run)
    for (int i = 0; i < kRows; ++i)
      for (int half = 0; half < 2; ++half) store16(sums + run * size + i * kColumns + half * 16, total[run][i][half]);
}

// One row of bfloat16, in vectors: little work for each byte of weight, so that memory alone sets the speed. The sums are
// bit for bit those that AMX makes of the row among others: of each tile the even and the odd depths by themselves, then
// both, then the tiles in order. Runs take turns line by line: tile by tile they bring 8 % less.
template <int kRuns>
void lone_sums(const Plain<bf16>& weight, const Groups& groups, float* sums, int64_t size) {
  const int64_t tiles = ceil_div(weight.depth, 32);
  const Runs<kRuns> runs(weight.groups, tiles * 2 * kTile, groups);
  f32x16 total[kRuns][1][2] = {};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t ahead = runs.ahead(tile * 2 * kTile);
    const float* row = weight.lone + tile * 32;
    for (int half = 0; half < 2; ++half) {
      f32x16 even[kRuns] = {}, odd[kRuns] = {};
      for (int pair = 0; pair < 16; ++pair)
        for (int run = 0; run < kRuns; ++run) {
          const char* line = runs.from[run] + tile * 2 * kTile + half * kTile + pair * 64;
          fetch(line + ahead);
          const u32x16 both = load_line(line);
          even[run] += bits_as<f32x16>(both << 16) * row[2 * pair];
          odd[run] += bits_as<f32x16>(both & 0xffff0000u) * row[2 * pair + 1];
        }
      for (int run = 0; run < kRuns; ++run) total[run][0][half] += even[run] + odd[run];
    }
  }
  store_totals(total, sums, size);
}
template <int kRuns>
void lone_sums(const Plain<float>&, const Groups&, float*, int64_t) {}

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

// sums [kRows, 32], less the columns' scales. The weights' bytes are raised by 128 for the instruction.
template <int kRows, int kRuns>
void byte_sums(const Int8& weight, int64_t row, const Groups& groups, float* sums, int64_t size) {
  const int64_t tiles = ceil_div(weight.depth, 32);
  const Runs<kRuns> runs(weight.groups, tiles * kTile, groups);
  const auto& few = weight.few;
  f32x16 total[kRuns][kRows][2] = {};
  for (int64_t tile = 0, place = row * tiles; tile < tiles; ++tile, ++place) {
    const int64_t ahead = runs.ahead(tile * kTile);
    for (int half = 0; half < 2; ++half) {
      i32x16 high[kRuns][kRows] = {}, low[kRuns][kRows];
      for (int run = 0; run < kRuns; ++run)
        for (int i = 0; i < kRows; ++i) low[run][i] = few.totals[place + i * tiles] - i32x16{};
      for (int line = 0; line < 8; ++line)
        for (int run = 0; run < kRuns; ++run) {
          const char* from = runs.from[run] + tile * kTile + half * kTile / 2 + line * 64;
          fetch(from + ahead);
          const u32x16 columns = load_line(from) ^ 0x80808080;
          for (int i = 0; i < kRows; ++i) {
            const int8_t* four = few.at(row + i, tile) + line * 4;
            high[run][i] = add_products(high[run][i], columns, four);
            low[run][i] = add_products(low[run][i], columns, four + 32);
          }
        }
      for (int run = 0; run < kRuns; ++run)
        for (int i = 0; i < kRows; ++i)
          total[run][i][half] += few.scales[place + i * tiles] * as_float((high[run][i] << 7) + low[run][i]);
    }
  }
  store_totals(total, sums, size);
}

// The same. High halves of bytes stay where they are, worth 16 times as much until their sum is known. Runs take turns
// tile by tile: line by line they bring 5 % less.
template <int kRows, int kRuns>
void byte_sums(const Int4& weight, int64_t row, const Groups& groups, float* sums, int64_t size) {
  const int64_t tiles = ceil_div(weight.depth, 32);
  const Runs<kRuns> runs(weight.groups, tiles * Int4::kTileBytes, groups);
  const auto& few = weight.few;
  f32x16 total[kRuns][kRows][2] = {};
  for (int64_t tile = 0, place = row * tiles; tile < tiles; ++tile, ++place) {
    const int64_t ahead = runs.ahead(tile * Int4::kTileBytes);
    for (int run = 0; run < kRuns; ++run) {
      const char* from = runs.from[run] + tile * Int4::kTileBytes;
      fetch(from + Nibbles::kSteps + ahead);
      for (int half = 0; half < 2; ++half) {
        i32x16 low[kRows] = {}, high[kRows] = {};
        for (int line = 0; line < 4; ++line) {
          const char* here = from + half * 256 + line * 64;
          fetch(here + ahead);
          const u32x16 both = load_line(here);
          for (int i = 0; i < kRows; ++i) {
            const int8_t* eight = few.at(row + i, tile) + line * 8;
            low[i] = add_products(low[i], both & 0x0f0f0f0f, eight);
            high[i] = add_products(high[i], both & 0xf0f0f0f0, eight + 4);
          }
        }
        const f32x16 step = load_bytes<uint8_t>(from + Nibbles::kSteps + half * 16);
        const f32x16 least = load_bytes<int8_t>(from + Nibbles::kLeast + half * 16);
        for (int i = 0; i < kRows; ++i) {
          const f32x16 sum = as_float(low[i] + (high[i] >> 4));
          total[run][i][half] += few.scales[place + i * tiles] * (step * sum + least * few.totals[place + i * tiles]);
        }
      }
    }
  }
  store_totals(total, sums, size);
}

// Up to eight rows with one group in the matrix unit, two bytes of a row as two rows of its left side. The same sums.
void matrix_sums(const Int8& weight, int64_t row, int64_t rows, int64_t group, float* sums) {
#if AIRDECODE_AMX
  const int64_t tiles = ceil_div(weight.depth, 32);
  const uint8_t* from = weight.groups + group * tiles * kTile;
  const auto& few = weight.few;
  alignas(64) i32x16 products[2][2][8][2];  // of this tile or the one before, of each half, row and byte
  f32x16 total[8][2] = {};
  for (int64_t tile = 0; tile < tiles; ++tile, from += kTile) {
    auto& product = products[tile % 2];
    fetch(from + kAhead, kTile);
    TILE_LOAD(4, few.at(row, tile), 32);
    TILE_ZERO(0);
    TILE_LOAD(6, from, 64);
    TILE_MULTIPLY_BYTES(0, 4, 6);
    TILE_STORE(0, product[0], 64);
    TILE_ZERO(1);
    TILE_LOAD(7, from + kTile / 2, 64);
    TILE_MULTIPLY_BYTES(1, 4, 7);
    TILE_STORE(1, product[1], 64);
    for (int half = 0; half < 2; ++half)
      for (int64_t i = 0; i < rows; ++i)
        total[i][half] +=
            few.scales[(row + i) * tiles + tile] * as_float((product[half][i][0] << 7) + product[half][i][1]);
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int half = 0; half < 2; ++half) store16(sums + i * kColumns + half * 16, total[i][half]);
#endif
}

// Up to 16 rows: one with both groups at once, more with one group after the other.
template <class Weight>
void few_sums(const TileScope& scope, const Weight& weight, int64_t row, int64_t rows, const Groups& groups, float* sums,
              int64_t size) {
  if (rows == 1 && groups.count == 2) return byte_sums<1, 2>(weight, row, groups, sums, size);
  each_group(groups, sums, size, [&](const Groups& one, float* to) {
    if constexpr (std::is_same_v<Weight, Int8>)
      if (scope.kind == Kernels::kAmx && Weight::in_bytes(weight.few.rows)) {
        for (int64_t i = 0; i < rows; i += 8)
          matrix_sums(weight, row + i, std::min<int64_t>(8, rows - i), one.first, to + i * kColumns);
        return;
      }
    in_pieces(rows, [&](auto count, int64_t i) { byte_sums<count, 1>(weight, row + i, one, to + i * kColumns, 0); });
  });
}

}  // namespace

template <class T>
void Plain<T>::prepare(const T* left, int64_t rows, float* to) {
  if constexpr (sizeof(T) == 2) {
    if (rows != 1) return;
    for (int64_t k = 0; k < ceil_div(depth, 32) * 32; k += 16)
      store16(to + k, load16(left_at(left, depth, 0, k / 32) + k % 32));
    lone = to;
  }
}

template <int kBytes>
ByteRows<kBytes>::ByteRows(const bf16* left, int64_t rows, int64_t depth, float* to) : rows(rows) {
  constexpr float kLargest = kBytes == 2 ? 127 * 128 : 127, kFactor = kBytes == 2 ? -128 : 16;
  const int64_t tiles = ceil_div(depth, 32);
  float* scale = to;
  Total* total = reinterpret_cast<Total*>(to + rows * tiles);
  int8_t* byte = reinterpret_cast<int8_t*>(total + rows * tiles);
  scales = scale, totals = total, bytes = byte;
  const f32x16 magic = splat(12582912.0f);  // adding it rounds to a whole number
  auto store_whole = [&](f32x16 raised, int8_t* place) {
    const f32x16 whole = raised - magic, high = kBytes == 2 ? whole * (1.0f / 128) + magic : raised;
    store_bytes(place, high);
    if (kBytes == 2) store_bytes(place + 32, whole - (high - magic) * 128 + magic);
    return whole;
  };
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const bf16* from = left_at(left, depth, row, tile);
      const f32x16 a = load16(from), b = load16(from + 16);
      const float largest = largest16(max16(max16(a, -a), max16(b, -b)));
      const float inverse = largest > 0 ? kLargest / largest : 0;
      int8_t* here = byte + (tile * rows + row) * kBytes * 32;
      const f32x16 wholes = store_whole(a * inverse + magic, here) + store_whole(b * inverse + magic, here + 16);
      *total++ = Total(kFactor * sum16(wholes));
      *scale++ = largest / kLargest + sum16((a + b) * 0);  // not a number where one of them is none
    }
}

// With one block of rows the group is fetched a little ahead; with more, each block fetches a share of the next group.
template <class T>
void Plain<T>::sums(const TileScope& scope, const T* left, int64_t row, int64_t rows, const Groups& groups,
                    float* sums, int64_t size) const {
  if (rows == 1 && lone && scope.kind == Kernels::kAmx)
    return groups.count == 2 ? lone_sums<2>(*this, groups, sums, size) : lone_sums<1>(*this, groups, sums, size);
  const int64_t numbers = group_size(this->groups, depth), bytes = numbers * int64_t(sizeof(T));
  const int64_t blocks = ceil_div(rows, kBlockRows), lines = ceil_div(32, blocks);
  each_group(groups, sums, size, [&](const Groups& one, float* to) {
    const T* from = this->groups + one.first * numbers;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t ahead = blocks == 1 ? kAhead : bytes + i * lines * (bytes / 32);
      tile_sums(scope, Product<T>{.left = left,
                                  .depth = depth,
                                  .row = row + i * kBlockRows,
                                  .rows = int(std::min<int64_t>(kBlockRows, rows - i * kBlockRows)),
                                  .group = from,
                                  .sums = to + i * kBlockRows * kColumns,
                                  .fetch = {reinterpret_cast<const char*>(from) + ahead, int(lines)}});
    }
  });
}
template struct Plain<float>;
template struct Plain<bf16>;

template <class Numbers>
void Scaled<Numbers>::sums(const TileScope& scope, const bf16* left, int64_t row, int64_t rows, const Groups& groups,
                           float* sums, int64_t size) const {
  if (few.bytes) few_sums(scope, *this, row, rows, groups, sums, size);
  each_group(groups, sums, size, [&](const Groups& one, float* to) {
    if (!few.bytes) piecewise(scope, left, *this, row, rows, one.first, to);
    const float* scale = scales + one.first * kColumns;
    for (int64_t i = 0; i < rows * kColumns; i += 16) store16(to + i, load16(to + i) * load16(scale + i % kColumns));
  });
}
template struct ByteRows<1>;
template struct ByteRows<2>;
template struct Scaled<Bytes>;
template struct Scaled<Nibbles>;

}  // namespace airdecode
