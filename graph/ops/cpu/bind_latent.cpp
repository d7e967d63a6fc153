// The operators of latent attention as torch sees them; bind.cpp says how.
#include "bind.h"
#include "latent.h"

using namespace airdecode;

namespace {

Rows rows_of(const Array& cache, Handle positions, Handle q_cu_len, Handle kv_len, const Handle* block_table) {
  Array at = Array(positions).expect("positions", {-1}), lengths = Array(kv_len).expect("kv_len", {-1});
  Rows step{.tokens = at.sizes[0],
            .rows = lengths.sizes[0],
            .blocks = cache.sizes[0],
            .block_size = cache.sizes[1],
            .positions = at.as<int32_t>("positions"),
            .q_cu_len = Array(q_cu_len).expect("q_cu_len", {lengths.sizes[0]}).as<int32_t>("q_cu_len"),
            .kv_len = lengths.as<int32_t>("kv_len"),
            .block_table = nullptr,
            .table_width = 0};
  if (block_table) {
    Array table = Array(*block_table).expect("block_table", {step.rows, -1});
    step.block_table = table.as<int32_t>("block_table"), step.table_width = table.sizes[1];
  }
  return step;
}

}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_air_latent_attention(Handle q, Handle q_rotated, Handle latent, Handle rotated,
                                                   Handle positions, Handle q_cu_len, Handle kv_len,
                                                   const Handle* block_table, const Handle* selected, double scale,
                                                   Handle* out) {
  return guarded([&] {
    Array nope = Array(latent).expect("latent", {-1, -1, 1, -1});
    Array rope = Array(rotated).expect("rotated", {nope.sizes[0], nope.sizes[1], 1, -1});
    Rows step = rows_of(nope, positions, q_cu_len, kv_len, block_table);
    Array in = Array(q).expect("q", {step.tokens, -1, nope.sizes[3]});
    int64_t heads = in.sizes[1], rank = nope.sizes[3];
    typed(in, [&](auto element) {
      using T = decltype(element);
      LatentAttention<T> op{
          .q = in.as<T>("q"),
          .q_rotated = Array(q_rotated).expect("q_rotated", {step.tokens, heads, rope.sizes[3]}).as<T>("q_rotated"),
          .latent = nope.as<T>("latent"),
          .rotated = rope.as<T>("rotated"),
          .heads = heads,
          .rank = rank,
          .rope = rope.sizes[3],
          .step = step,
          .selected = nullptr,
          .top = 0,
          .scale = float(scale),
          .out = make(out, {step.tokens, heads, rank}, in.type).template as<T>("out")};
      if (selected) {
        Array chosen = Array(*selected).expect("selected", {step.tokens, -1});
        op.selected = chosen.as<int32_t>("selected"), op.top = chosen.sizes[1];
      }
      op.run();
    });
  });
}

AOTITorchError aoti_torch_cpu_air_latent_select(Handle q, Handle head_weights, Handle key, Handle positions,
                                                Handle q_cu_len, Handle kv_len, const Handle* block_table, int64_t top,
                                                Handle* out) {
  return guarded([&] {
    Array keys = Array(key).expect("key", {-1, -1, 1, -1});
    Rows step = rows_of(keys, positions, q_cu_len, kv_len, block_table);
    Array in = Array(q).expect("q", {step.tokens, -1, keys.sizes[3]});
    int64_t chosen = std::min(top, step.capacity());
    typed(in, [&](auto element) {
      using T = decltype(element);
      LatentSelect<T>{
          .q = in.as<T>("q"),
          .head_weights =
              Array(head_weights).expect("head_weights", {step.tokens, in.sizes[1]}).as<float>("head_weights"),
          .key = keys.as<T>("key"),
          .heads = in.sizes[1],
          .dim = keys.sizes[3],
          .top = chosen,
          .step = step,
          .out = make(out, {step.tokens, chosen}, aoti_torch_dtype_int32()).template as<int32_t>("out")}
          .run();
    });
  });
}

AOTITorchError aoti_torch_cpu_air_head_linear(Handle x, Handle weight, int64_t columns, Handle* out) {
  return guarded([&] {
    Array in(x);
    if (in.dims != 3 || in.strides[2] != 1) refuse("x has another shape or layout than the operator takes");
    int64_t tokens = in.sizes[0], heads = in.sizes[1], depth = in.sizes[2], groups = (columns + 31) / 32 * heads;
    Array to = make(out, {tokens, heads, columns}, in.type), matrix(weight);
    typed(in, [&](auto element) {
      using T = decltype(element);
      if constexpr (sizeof(T) == 4)
        matrix.expect("weight", {groups, depth, 32});
      else
        matrix.expect("weight", {groups, (depth + 31) / 32, 2, 16, 16, 2});
      HeadLinear<T>{.x = in.as<T>("x"),
                    .tokens = tokens,
                    .heads = heads,
                    .depth = depth,
                    .columns = columns,
                    .token_stride = in.strides[0],
                    .head_stride = in.strides[1],
                    .groups = matrix.as<T>("weight"),
                    .out = to.as<T>("out")}
          .run();
    });
  });
}

}  // extern "C"

// clang-format off
#define AIRDECODE_LATENT_OPERATORS(OP)                                                                              \
  OP(air_latent_attention,                                                                                          \
     "(Tensor q, Tensor q_rotated, Tensor latent, Tensor rotated, Tensor positions, Tensor q_cu_len, "              \
     "Tensor kv_len, Tensor? block_table, Tensor? selected, float scale) -> Tensor")                                \
  OP(air_latent_select,                                                                                             \
     "(Tensor q, Tensor head_weights, Tensor key, Tensor positions, Tensor q_cu_len, Tensor kv_len, "               \
     "Tensor? block_table, int top) -> Tensor")                                                                     \
  OP(air_head_linear, "(Tensor x, Tensor weight, int columns) -> Tensor")

#define DEFINE(name, schema) library.def(#name schema);
#define IMPLEMENT(name, schema) library.impl(#name, Boxed<&aoti_torch_cpu_##name>::call);

STABLE_TORCH_LIBRARY_FRAGMENT(airdecode, library) { AIRDECODE_LATENT_OPERATORS(DEFINE) }
STABLE_TORCH_LIBRARY_IMPL(airdecode, CPU, library) { AIRDECODE_LATENT_OPERATORS(IMPLEMENT) }
