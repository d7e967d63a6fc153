#include "tiles.h"

#include <algorithm>
#include <cstdlib>

#include "amx.h"

#if AIRDECODE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace airdecode {
namespace {

Kernels detect() {
#if AIRDECODE_AMX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return Kernels::kAmx;
#endif
#if defined(__AVX512BF16__)
  return Kernels::kAvx512;
#else
  return Kernels::kPortable;
#endif
}

const Kernels best = detect();
Kernels limit = Kernels::kAmx;

inline void fetch_ahead(Fetch& fetch) {
  for (int i = 0; i < fetch.lines; ++i, fetch.from += 64) __builtin_prefetch(fetch.from, 0, 2);
}

// -- AMX: sixteen rows by sixteen columns by 32 deep in one instruction
// -------------------------------------------------
#if AIRDECODE_AMX
void configure(int64_t rows, bool bytes) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int tile = 0; tile < 8; ++tile) {
    shape.row_bytes[tile] = 64;
    shape.rows[tile] = uint8_t(tile < 6 ? std::min<int64_t>(rows, 16) : 16);  // 0-3 sums, 4-5 left, 6-7 right
  }
  if (bytes) {
    shape.rows[0] = shape.rows[1] = shape.rows[4] = 16;
    shape.row_bytes[4] = 32, shape.rows[6] = shape.rows[7] = 8;
  }
  asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}

// Four sums, or with up to sixteen rows two: sums 0 and 1 are rows 0-15, sums 2 and 3 rows 16-31.
void amx_sums(const Product<bf16>& p, const bf16* left) {
  const int64_t strip = ceil_div(p.depth, 32) * 512;  // from sixteen rows to the next
  float *sums = p.sums, *below = sums + 16 * p.stride;
  const bool tall = p.rows > 16;
  Fetch fetch = p.fetch;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  if (p.add) {
    TILE_LOAD(0, sums, p.stride * 4);
    TILE_LOAD(1, sums + 16, p.stride * 4);
    if (tall) {
      TILE_LOAD(2, below, p.stride * 4);
      TILE_LOAD(3, below + 16, p.stride * 4);
    }
  }
  if (!tall) {
    for (int64_t k = 0; k < p.tiles; ++k) {
      fetch_ahead(fetch);
      TILE_LOAD(4, left + k * 512, 64);
      TILE_LOAD(6, p.group + k * 1024, 64);
      TILE_MULTIPLY(0, 4, 6);
      TILE_LOAD(7, p.group + k * 1024 + 512, 64);
      TILE_MULTIPLY(1, 4, 7);
    }
  } else {
    for (int64_t k = 0; k < p.tiles; ++k) {
      fetch_ahead(fetch);
      TILE_LOAD(4, left + k * 512, 64);
      TILE_LOAD(6, p.group + k * 1024, 64);
      TILE_MULTIPLY(0, 4, 6);
      TILE_LOAD(7, p.group + k * 1024 + 512, 64);
      TILE_MULTIPLY(1, 4, 7);
      TILE_LOAD(5, left + strip + k * 512, 64);
      TILE_MULTIPLY(2, 5, 6);
      TILE_MULTIPLY(3, 5, 7);
    }
    TILE_STORE(2, below, p.stride * 4);
    TILE_STORE(3, below + 16, p.stride * 4);
  }
  TILE_STORE(0, sums, p.stride * 4);
  TILE_STORE(1, sums + 16, p.stride * 4);
}
#endif

// -- A few rows at a time in vectors: `left` and `sums` are those of the first of kRows rows
// ---------------------------
template <int kRows>
void load_sums(const Product<bf16>& p, const float* from, f32x16 (&sum)[kRows][2]) {
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) sum[i][half] = p.add ? load16(from + i * p.stride + half * 16) : f32x16{};
}

template <int kRows>
void store_sums(const f32x16 (&sum)[kRows][2], float* to, int64_t stride) {
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) store16(to + i * stride + half * 16, sum[i][half]);
}

#if defined(__AVX512BF16__)
template <int kRows>
void avx512_sums(const Product<bf16>& p, const bf16* left, Fetch fetch, float* sums) {
  f32x16 sum[kRows][2];
  load_sums(p, sums, sum);
  for (int64_t k = 0; k < p.tiles; ++k) {
    fetch_ahead(fetch);
    for (int pair = 0; pair < 16; ++pair) {
      const bf16* columns = p.group + k * 1024 + pair * 32;
      __m512bh a = (__m512bh)_mm512_loadu_si512(columns), b = (__m512bh)_mm512_loadu_si512(columns + 512);
      for (int i = 0; i < kRows; ++i) {
        int32_t both;
        std::memcpy(&both, left + k * 512 + i * 32 + pair * 2, 4);
        __m512bh x = (__m512bh)_mm512_set1_epi32(both);
        sum[i][0] = (f32x16)_mm512_dpbf16_ps((__m512)sum[i][0], a, x);
        sum[i][1] = (f32x16)_mm512_dpbf16_ps((__m512)sum[i][1], b, x);
      }
    }
  }
  store_sums(sum, sums, p.stride);
}
#endif

template <int kRows>
void plain_sums(const Product<bf16>& p, const bf16* left, Fetch fetch, float* sums) {
  f32x16 sum[kRows][2];
  load_sums(p, sums, sum);
  for (int64_t k = 0; k < p.tiles; ++k) {
    fetch_ahead(fetch);
    for (int pair = 0; pair < 16; ++pair)
      for (int half = 0; half < 2; ++half) {
        u32x16 both;
        std::memcpy(&both, p.group + k * 1024 + half * 512 + pair * 32, sizeof(both));
        f32x16 even = bits_as<f32x16>(both << 16), odd = bits_as<f32x16>(both & 0xffff0000u);
        for (int i = 0; i < kRows; ++i) {
          const bf16* x = left + k * 512 + i * 32 + pair * 2;
          sum[i][half] += even * widen(x[0]);
          sum[i][half] += odd * widen(x[1]);
        }
      }
  }
  store_sums(sum, sums, p.stride);
}

template <int kRows>
void plain_sums(const Product<float>& p, const float* left, Fetch fetch, float* sums) {
  f32x16 total[kRows][2] = {};
  for (int64_t begin = 0; begin < p.depth; begin += 64) {  // short sums, then their sum: a quarter of the rounding error
    f32x16 sum[kRows][2] = {};
    for (int64_t k = begin, end = std::min<int64_t>(begin + 64, p.depth); k < end; ++k) {
      if (k % 32 == 0) fetch_ahead(fetch);
      f32x16 a = load16(p.group + k * 32), b = load16(p.group + k * 32 + 16);
      for (int i = 0; i < kRows; ++i) {
        sum[i][0] += a * left[i * p.depth + k];
        sum[i][1] += b * left[i * p.depth + k];
      }
    }
    for (int i = 0; i < kRows; ++i)
      for (int half = 0; half < 2; ++half) total[i][half] += sum[i][half];
  }
  store_sums(total, sums, p.stride);
}

}  // namespace

Kernels kernels() { return std::min(best, limit); }

extern "C" int airdecode_limit_kernels(int level) {
  limit = Kernels(level);
  return int(kernels());
}

TileScope::TileScope(int64_t rows, bool bytes) : kind(kernels()) {
#if AIRDECODE_AMX
  if (kind == Kernels::kAmx) configure(rows, bytes);
#endif
}

TileScope::~TileScope() {
#if AIRDECODE_AMX
  if (kind == Kernels::kAmx) asm volatile("tilerelease" ::);
#endif
}

void tile_sums(const TileScope& scope, const Product<bf16>& p) {
  const bf16* left = left_at(p.left, p.depth, p.row, p.first_tile);
#if AIRDECODE_AMX
  if (scope.kind == Kernels::kAmx) return amx_sums(p, left);
#endif
  in_pieces(p.rows, [&](auto count, int64_t done) {
    const bf16* from = left_at(p.left, p.depth, p.row + done, p.first_tile);
    Fetch fetch = done ? Fetch() : p.fetch;
#if defined(__AVX512BF16__)
    if (scope.kind == Kernels::kAvx512) return avx512_sums<count>(p, from, fetch, p.sums + done * p.stride);
#endif
    plain_sums<count>(p, from, fetch, p.sums + done * p.stride);
  });
}

void tile_sums(const TileScope&, const Product<float>& p) {
  in_pieces(p.rows, [&](auto count, int64_t done) {
    const float* from = p.left + (p.row + done) * p.depth;
    plain_sums<count>(p, from, done ? Fetch() : p.fetch, p.sums + done * p.stride);
  });
}

void pack_left(const bf16* x, int64_t stride, int64_t depth, int64_t first, int64_t last, bf16* left) {
  for (int64_t row = first; row < last; ++row)
    for (int64_t tile = 0; tile * 32 < depth; ++tile) {
      bf16* to = left_at(left, depth, row, tile);
      int64_t count = std::min<int64_t>(32, depth - tile * 32);
      if (count < 32) std::memset(to, 0, 64);
      std::memcpy(to, x + row * stride + tile * 32, count * 2);
    }
}

void pack_left(const float* x, int64_t stride, int64_t depth, int64_t first, int64_t last, bf16* left) {
  for (int64_t row = first; row < last; ++row)
    for (int64_t k = 0; k < ceil_div(depth, 32) * 32; k += 16)
      store16(left_at(left, depth, row, k / 32) + k % 32, k < depth ? load(x + row * stride + k, depth - k) : f32x16{});
}

void pack_left(const float* x, int64_t stride, int64_t depth, int64_t first, int64_t last, float* left) {
  for (int64_t row = first; row < last; ++row) std::memcpy(left + row * depth, x + row * stride, depth * 4);
}

}  // namespace airdecode
