// The matrix unit's instructions: sixteen rows by sixteen columns by 32 deep of bfloat16 in one, or of signed bytes.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__)
#define AIRDECODE_AMX 1
// Own assembly: GCC 12's intrinsics do not tell the compiler which memory they read.
#define TILE_LOAD(tile, address, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(address), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, address, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(address), "r"(int64_t(stride)) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_MULTIPLY(sum, left, right) asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)
#define TILE_MULTIPLY_BYTES(sum, left, right) asm volatile("tdpbssd %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)
#endif
