// What the kernels do, in plain pointers and numbers; they know nothing of torch. T is float or bf16, the type of
// activations and caches. Every result depends on its own row only, and not on the number of threads.
#pragma once

#include "gate.h"
#include "simd.h"

namespace airdecode {

// Weight is one of the formats of formats.h, with `columns` outputs and `depth` inputs. Quantised weights take
// activations rounded to bfloat16.

// out [rows, columns] = x [rows, depth] W' + bias; rows of x lie `stride` apart; bias may be null. Out is T or float.
template <class T, class Weight, class Out>
void linear(const T* x, int64_t rows, int64_t stride, const Weight& weight, const T* bias, Out* out);

// out = down(act(gate) * up). gate_up's first half of columns is gate; that half is a multiple of 32.
template <class T, class Weight>
void gated_mlp(const T* x, int64_t rows, int64_t stride, Weight gate_up, const T* gate_up_bias, const Weight& down,
               const T* down_bias, Gate activation, T* out);

// Each token's mix of the experts that it chose, which lie one after the other in gate_up and down; only chosen experts are
// read. A half of gate_up is padded to whole groups of columns. Ids from num_experts on stand for x itself.
template <class T, class Weight>
struct Experts {
  const T* x;  // [tokens, hidden], rows `stride` apart
  int64_t tokens, stride, hidden, width, top, num_experts, identity;
  const float* weights;  // [tokens, top]
  const int32_t* ids;    // [tokens, top]
  const bool* live;      // [tokens]
  const T* shared;       // [tokens, hidden] or null
  Weight gate_up, down;
  const T *gate_up_bias, *down_bias;  // [num_experts, 2 * width], [num_experts, hidden], or null
  Gate gate;
  T* out;  // [tokens, hidden]

  void run() const;
};

// out [count, depth]: row ids[i] of the matrix as a checkpoint has it, [columns, depth].
template <class Weight, class Out>
void packed_rows(const Weight& weight, const int32_t* ids, int64_t count, Out* out);

// Llama's norm: statistics in float32, rounded to T, then the product with `weight`. With a residual, norms
// total = x + residual (rounded to T first).
template <class T>
void rms_norm(const T* x, const T* residual, const T* weight, int64_t rows, int64_t width, double eps, T* out,
              T* total);

// out [rows]: the first of the largest numbers; a NaN counts as the largest.
template <class T>
void argmax(const T* logits, int64_t rows, int64_t width, int32_t* out);

// out [rows, width] = weights, with 0 in place of those that top-k and then top-p exclude; see Ops.likeliest.
void likeliest(const float* scores, const float* weights, const int32_t* top_k, const float* top_p, int64_t rows,
               int64_t width, float* out);

// Splits qkv [tokens, (query_heads + 2 * kv_heads) * dim], norms heads where a weight is given, turns the first 2 *
// half dims of queries and keys, writes keys and values at their slots, and queries to `out` [tokens, query_heads,
// dim].
template <class T>
struct RotateAndCache {
  const T* qkv;
  int64_t tokens, query_heads, kv_heads, dim, half, slots;
  const float *cos, *sin;  // [tokens, half]
  bool interleaved;
  const T *q_norm, *k_norm;  // [dim] or null
  double eps;
  const int32_t* slot_mapping;
  T *key, *value;  // [slots, kv_heads, dim]
  T* out;

  void run() const;
};

// Causal attention of packed queries over a paged cache; see Ops.attention. Reads keys below kv_len that a query can
// see, and nothing else of cache and table.
template <class T>
struct Attention {
  const T* q;            // [tokens, query_heads, dim]
  const T *key, *value;  // [blocks, block_size, kv_heads, dim]
  int64_t tokens, rows, query_heads, kv_heads, dim, blocks, block_size;
  const int32_t *positions, *q_cu_len, *kv_len;
  const int32_t* block_table;  // [rows, table_width], or null: row b owns blocks b * (blocks / rows) and on
  int64_t table_width;
  const T* sinks;  // [query_heads] or null
  float scale;
  int64_t window;  // 0: none
  T* out;          // [tokens, query_heads, dim]

  void run() const;
};

}  // namespace airdecode
