#include "tiles.h"

#include <algorithm>
#include <cstdlib>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define AIRDECODE_AMX 1
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
// Own assembly: GCC 12's intrinsics do not tell the compiler which memory they read.
#define TILE_LOAD(tile, address, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(address), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, address, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(address), "r"(int64_t(stride)) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_MULTIPLY(sum, left, right) asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)

void configure(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int tile = 0; tile < 8; ++tile) {
    shape.row_bytes[tile] = 64;
    shape.rows[tile] = uint8_t(tile < 6 ? std::min<int64_t>(rows, 16) : 16);  // 0-3 sums, 4-5 left, 6-7 right
  }
  asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}

void amx_sums(const bf16* left, int64_t tiles, int rows, const bf16* group, Fetch fetch, float* sums, int64_t stride) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  if (rows <= 16) {
    for (int64_t k = 0; k < tiles; ++k) {
      fetch_ahead(fetch);
      TILE_LOAD(4, left + k * 512, 64);
      TILE_LOAD(6, group + k * 1024, 64);
      TILE_MULTIPLY(0, 4, 6);
      TILE_LOAD(7, group + k * 1024 + 512, 64);
      TILE_MULTIPLY(1, 4, 7);
    }
  } else {
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < tiles; ++k) {
      fetch_ahead(fetch);
      TILE_LOAD(4, left + k * 512, 64);
      TILE_LOAD(6, group + k * 1024, 64);
      TILE_MULTIPLY(0, 4, 6);
      TILE_LOAD(7, group + k * 1024 + 512, 64);
      TILE_MULTIPLY(1, 4, 7);
      TILE_LOAD(5, left + (tiles + k) * 512, 64);
      TILE_MULTIPLY(2, 5, 6);
      TILE_MULTIPLY(3, 5, 7);
    }
    TILE_STORE(2, sums + 16 * stride, stride * 4);
    TILE_STORE(3, sums + 16 * stride + 16, stride * 4);
  }
  TILE_STORE(0, sums, stride * 4);
  TILE_STORE(1, sums + 16, stride * 4);
}
#endif

// -- AVX-512 with bfloat16 pairs
// ---------------------------------------------------------------------------------------
#if defined(__AVX512BF16__)
template <int kRows>
void avx512_sums(const bf16* left, int64_t tiles, const bf16* group, Fetch fetch, float* sums, int64_t stride) {
  __m512 sum[kRows][2];
  for (auto& row : sum) row[0] = row[1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < tiles; ++k) {
    fetch_ahead(fetch);
    for (int pair = 0; pair < 16; ++pair) {
      const bf16* columns = group + k * 1024 + pair * 32;
      __m512bh a = (__m512bh)_mm512_loadu_si512(columns), b = (__m512bh)_mm512_loadu_si512(columns + 512);
      for (int i = 0; i < kRows; ++i) {
        int32_t both;
        std::memcpy(&both, left + k * 512 + i * 32 + pair * 2, 4);
        __m512bh x = (__m512bh)_mm512_set1_epi32(both);
        sum[i][0] = _mm512_dpbf16_ps(sum[i][0], a, x);
        sum[i][1] = _mm512_dpbf16_ps(sum[i][1], b, x);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    _mm512_storeu_ps(sums + i * stride, sum[i][0]);
    _mm512_storeu_ps(sums + i * stride + 16, sum[i][1]);
  }
}
#endif

// -- Portable
// ----------------------------------------------------------------------------------------------------------
template <int kRows>
void plain_sums(const bf16* left, int64_t tiles, const bf16* group, Fetch fetch, float* sums, int64_t stride) {
  f32x16 sum[kRows][2] = {};
  for (int64_t k = 0; k < tiles; ++k) {
    fetch_ahead(fetch);
    for (int pair = 0; pair < 16; ++pair)
      for (int half = 0; half < 2; ++half) {
        u32x16 both;
        std::memcpy(&both, group + k * 1024 + half * 512 + pair * 32, sizeof(both));
        f32x16 even = bits_as<f32x16>(both << 16), odd = bits_as<f32x16>(both & 0xffff0000u);
        for (int i = 0; i < kRows; ++i) {
          const bf16* x = left + k * 512 + i * 32 + pair * 2;
          sum[i][half] += even * widen(x[0]);
          sum[i][half] += odd * widen(x[1]);
        }
      }
  }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) store16(sums + i * stride + half * 16, sum[i][half]);
}

template <int kRows>
void plain_sums(const float* left, int64_t depth, const float* group, Fetch fetch, float* sums, int64_t stride) {
  f32x16 sum[kRows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    if (k % 32 == 0) fetch_ahead(fetch);
    f32x16 a = load16(group + k * 32), b = load16(group + k * 32 + 16);
    for (int i = 0; i < kRows; ++i) {
      sum[i][0] += a * left[i * depth + k];
      sum[i][1] += b * left[i * depth + k];
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) store16(sums + i * stride + half * 16, sum[i][half]);
}

// Calls step(integral_constant<rows>, offset) for pieces of 8, 4, 2 and 1 rows.
template <class Step>
void in_pieces(int rows, Step&& step) {
  int done = 0;
  for (; rows - done >= 8; done += 8) step(std::integral_constant<int, 8>(), done);
  if (rows - done >= 4) step(std::integral_constant<int, 4>(), done), done += 4;
  if (rows - done >= 2) step(std::integral_constant<int, 2>(), done), done += 2;
  if (rows - done >= 1) step(std::integral_constant<int, 1>(), done);
}

}  // namespace

Kernels kernels() { return std::min(best, limit); }

extern "C" int airdecode_limit_kernels(int level) {
  limit = Kernels(level);
  return int(kernels());
}

TileScope::TileScope(int64_t rows) : kind(kernels()) {
#if AIRDECODE_AMX
  if (kind == Kernels::kAmx) configure(rows);
#endif
}

TileScope::~TileScope() {
#if AIRDECODE_AMX
  if (kind == Kernels::kAmx) asm volatile("tilerelease" ::);
#endif
}

void tile_sums(const TileScope& scope, const bf16* left, int64_t depth, int64_t row, int rows, const bf16* group,
               Fetch fetch, float* sums, int64_t stride) {
  int64_t tiles = ceil_div(depth, 32);
  left = left_at(left, depth, row, 0);
#if AIRDECODE_AMX
  if (scope.kind == Kernels::kAmx) return amx_sums(left, tiles, rows, group, fetch, sums, stride);
#endif
  in_pieces(rows, [&](auto count, int done) {
    const bf16* from = left + done / 16 * tiles * 512 + done % 16 * 32;
    Fetch once = done ? Fetch() : fetch;
#if defined(__AVX512BF16__)
    if (scope.kind == Kernels::kAvx512)
      return avx512_sums<count>(from, tiles, group, once, sums + done * stride, stride);
#endif
    plain_sums<count>(from, tiles, group, once, sums + done * stride, stride);
  });
}

void tile_sums(const TileScope&, const float* left, int64_t depth, int64_t row, int rows, const float* group,
               Fetch fetch, float* sums, int64_t stride) {
  in_pieces(rows, [&](auto count, int done) {
    plain_sums<count>(left + (row + done) * depth, depth, group, done ? Fetch() : fetch, sums + done * stride, stride);
  });
}

void pack_left(const bf16* x, int64_t stride, int64_t depth, int64_t first, int64_t last, bf16* left) {
  int64_t whole = depth / 32, rest = depth % 32;
  for (int64_t row = first; row < last; ++row) {
    const bf16* from = x + row * stride;
    for (int64_t tile = 0; tile < whole; ++tile) std::memcpy(left_at(left, depth, row, tile), from + tile * 32, 64);
    if (!rest) continue;
    bf16* to = left_at(left, depth, row, whole);
    std::memset(to, 0, 64);
    std::memcpy(to, from + whole * 32, rest * 2);
  }
}

void pack_left(const float* x, int64_t stride, int64_t depth, int64_t first, int64_t last, float* left) {
  for (int64_t row = first; row < last; ++row) std::memcpy(left + row * depth, x + row * stride, depth * 4);
}

}  // namespace airdecode
