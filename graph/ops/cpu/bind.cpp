// The operators as torch sees them. Each is one C function on tensor handles, which compiled graphs call directly; the
// same function is registered with the dispatcher for eager use. Shapes and types are checked here, once; the kernels
// behind get plain pointers.
#include "bind.h"

#include "formats.h"
#include "kernels.h"

using namespace airdecode;

namespace {

template <class T>
const T* vector_or_null(const char* name, const Handle* handle, int64_t size) {
  return handle ? Array(*handle).expect(name, {size}).as<T>(name) : nullptr;
}

// Calls body with the weight in its own format, which its dtype tells: T as it is, int8 or int4 (bytes).
template <class T, class Body>
void with_weight(const char* name, Handle handle, const Handle* scales, int64_t columns, int64_t depth, Body&& body) {
  Array weight(handle);
  int64_t groups = (columns + 31) / 32, tiles = (depth + 31) / 32;
  auto scaled = [&](auto format) {
    const float* scale = vector_or_null<float>("scales", scales, groups * 32);
    if (!scale) refuse("a quantised weight needs its scales");
    format.groups = static_cast<uint8_t*>(weight.data), format.scales = scale;
    format.columns = columns, format.depth = depth;
    body(format);
  };
  if (weight.type == aoti_torch_dtype_uint8()) {
    weight.expect(name, {groups, tiles, Int4::kTileBytes});
    scaled(Int4());
  } else if (weight.type == aoti_torch_dtype_int8()) {
    weight.expect(name, {groups, tiles, 2, 8, 16, 4});
    scaled(Int8());
  } else if constexpr (sizeof(T) == 4) {
    weight.expect(name, {groups, depth, 32});
    body(Plain<T>{.groups = weight.as<T>(name), .columns = columns, .depth = depth});
  } else {
    weight.expect(name, {groups, tiles, 2, 16, 16, 2});
    body(Plain<T>{.groups = weight.as<T>(name), .columns = columns, .depth = depth});
  }
}

}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_air_linear(Handle x, Handle weight, const Handle* scales, const Handle* bias,
                                         int64_t columns, int64_t wide, Handle* out) {
  return guarded([&] {
    Array in = Array(x).expect("x", {-1, -1}, true);
    Array to = make(out, {in.sizes[0], columns}, wide ? aoti_torch_dtype_float32() : in.type);
    typed(in, [&](auto element) {
      using T = decltype(element);
      const T* added = vector_or_null<T>("bias", bias, columns);
      with_weight<T>("weight", weight, scales, columns, in.sizes[1], [&](const auto& matrix) {
        if (wide)
          linear(in.as<T>("x"), in.sizes[0], in.strides[0], matrix, added, to.as<float>("out"));
        else
          linear(in.as<T>("x"), in.sizes[0], in.strides[0], matrix, added, to.as<T>("out"));
      });
    });
  });
}

AOTITorchError aoti_torch_cpu_air_gated_mlp(Handle x, Handle gate_up, const Handle* gate_up_scales,
                                            const Handle* gate_up_bias, Handle down, const Handle* down_scales,
                                            const Handle* down_bias, int64_t width, int64_t columns, int64_t activation,
                                            Handle* out) {
  return guarded([&] {
    Array in = Array(x).expect("x", {-1, -1}, true);
    if (width % 32) refuse("the feed-forward width is no multiple of 32");
    Array to = make(out, {in.sizes[0], columns}, in.type);
    typed(in, [&](auto element) {
      using T = decltype(element);
      const T* first_bias = vector_or_null<T>("gate_up_bias", gate_up_bias, 2 * width);
      const T* second_bias = vector_or_null<T>("down_bias", down_bias, columns);
      with_weight<T>("gate_up", gate_up, gate_up_scales, 2 * width, in.sizes[1], [&](const auto& first) {
        with_weight<T>("down", down, down_scales, columns, width, [&](const auto& second) {
          if constexpr (std::is_same_v<decltype(first), decltype(second)>)
            gated_mlp(in.as<T>("x"), in.sizes[0], in.strides[0], first, first_bias, second, second_bias,
                      Gate{Activation(activation)}, to.as<T>("out"));
          else
            refuse("gate_up and down are kept in different formats");
        });
      });
    });
  });
}

AOTITorchError aoti_torch_cpu_air_experts(Handle x, Handle weights, Handle ids, Handle live, const Handle* shared,
                                          Handle gate_up, const Handle* gate_up_scales, const Handle* gate_up_bias,
                                          Handle down, const Handle* down_scales, const Handle* down_bias,
                                          int64_t num_experts, int64_t width, int64_t identity, int64_t activation,
                                          double alpha, double limit, Handle* out) {
  return guarded([&] {
    Array in = Array(x).expect("x", {-1, -1}, true), chosen = Array(ids).expect("ids", {in.sizes[0], -1});
    int64_t tokens = in.sizes[0], hidden = in.sizes[1], top = chosen.sizes[1];
    int64_t columns = (width + 31) / 32 * 64, down_columns = (hidden + 31) / 32 * 32;
    Array to = make(out, {tokens, hidden}, in.type);
    typed(in, [&](auto element) {
      using T = decltype(element);
      with_weight<T>("gate_up", gate_up, gate_up_scales, num_experts * columns, hidden, [&](auto first) {
        with_weight<T>("down", down, down_scales, num_experts * down_columns, width, [&](auto second) {
          if constexpr (std::is_same_v<std::decay_t<decltype(first)>, std::decay_t<decltype(second)>>) {
            first.columns = columns, second.columns = hidden;
            Experts<T, std::decay_t<decltype(first)>>{
                .x = in.as<T>("x"),
                .tokens = tokens,
                .stride = in.strides[0],
                .hidden = hidden,
                .width = width,
                .top = top,
                .num_experts = num_experts,
                .identity = identity,
                .weights = Array(weights).expect("weights", {tokens, top}).as<float>("weights"),
                .ids = chosen.as<int32_t>("ids"),
                .live = Array(live).expect("live", {tokens}).as<bool>("live"),
                .shared = shared ? Array(*shared).expect("shared", {tokens, hidden}).as<T>("shared") : nullptr,
                .gate_up = first,
                .down = second,
                .gate_up_bias = vector_or_null<T>("gate_up_bias", gate_up_bias, num_experts * 2 * width),
                .down_bias = vector_or_null<T>("down_bias", down_bias, num_experts * hidden),
                .gate = {Activation(activation), float(alpha), float(limit)},
                .out = to.as<T>("out")}
                .run();
          } else {
            refuse("gate_up and down are kept in different formats");
          }
        });
      });
    });
  });
}

AOTITorchError aoti_torch_cpu_air_rows(Handle weight, const Handle* scales, Handle ids, int64_t columns, int64_t depth,
                                       int64_t wide, Handle* out) {
  return guarded([&] {
    Array chosen = Array(ids).expect("ids", {-1});
    Array to = make(out, {chosen.sizes[0], depth}, wide ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16());
    typed(to, [&](auto element) {
      using T = decltype(element);
      with_weight<T>("weight", weight, scales, columns, depth, [&](const auto& matrix) {
        packed_rows(matrix, chosen.as<int32_t>("ids"), chosen.sizes[0], to.as<T>("out"));
      });
    });
  });
}

AOTITorchError aoti_torch_cpu_air_rms_norm(Handle x, Handle weight, double eps, Handle* out) {
  return guarded([&] {
    Array in = Array(x).expect("x", {-1, -1});
    typed(in, [&](auto element) {
      using T = decltype(element);
      const T* scale = Array(weight).expect("weight", {in.sizes[1]}).as<T>("weight");
      Array to = make(out, {in.sizes[0], in.sizes[1]}, in.type);
      rms_norm<T>(in.as<T>("x"), nullptr, scale, in.sizes[0], in.sizes[1], eps, to.as<T>("out"), nullptr);
    });
  });
}

AOTITorchError aoti_torch_cpu_air_add_rms_norm(Handle x, Handle residual, Handle weight, double eps, Handle* out,
                                               Handle* total) {
  return guarded([&] {
    Array in = Array(x).expect("x", {-1, -1});
    typed(in, [&](auto element) {
      using T = decltype(element);
      const T* other = Array(residual).expect("residual", {in.sizes[0], in.sizes[1]}).as<T>("residual");
      const T* scale = Array(weight).expect("weight", {in.sizes[1]}).as<T>("weight");
      Array to = make(out, {in.sizes[0], in.sizes[1]}, in.type), sum = make(total, {in.sizes[0], in.sizes[1]}, in.type);
      rms_norm(in.as<T>("x"), other, scale, in.sizes[0], in.sizes[1], eps, to.as<T>("out"), sum.as<T>("total"));
    });
  });
}

AOTITorchError aoti_torch_cpu_air_argmax(Handle logits, Handle* out) {
  return guarded([&] {
    Array in = Array(logits).expect("logits", {-1, -1});
    Array to = make(out, {in.sizes[0]}, aoti_torch_dtype_int32());
    typed(in, [&](auto element) {
      argmax(in.as<decltype(element)>("logits"), in.sizes[0], in.sizes[1], to.as<int32_t>("out"));
    });
  });
}

AOTITorchError aoti_torch_cpu_air_likeliest(Handle scores, Handle weights, Handle top_k, Handle top_p, Handle* out) {
  return guarded([&] {
    Array in = Array(scores).expect("scores", {-1, -1});
    int64_t rows = in.sizes[0], width = in.sizes[1];
    Array to = make(out, {rows, width}, aoti_torch_dtype_float32());
    likeliest(in.as<float>("scores"), Array(weights).expect("weights", {rows, width}).as<float>("weights"),
              Array(top_k).expect("top_k", {rows}).as<int32_t>("top_k"),
              Array(top_p).expect("top_p", {rows}).as<float>("top_p"), rows, width, to.as<float>("out"));
  });
}

AOTITorchError aoti_torch_cpu_air_rotate_and_cache(Handle qkv, Handle cos, Handle sin, Handle key, Handle value,
                                                   Handle slots, const Handle* q_norm, const Handle* k_norm,
                                                   int64_t query_heads, int64_t interleaved, double eps, Handle* out) {
  return guarded([&] {
    Array in = Array(qkv).expect("qkv", {-1, -1}), keys = Array(key).expect("key", {-1, -1, -1, -1});
    int64_t tokens = in.sizes[0], heads = keys.sizes[2], dim = keys.sizes[3];
    if (in.sizes[1] != (query_heads + 2 * heads) * dim) refuse("qkv does not have (H + 2 G) * D columns");
    Array angles = Array(cos).expect("cos", {tokens, -1});
    if (2 * angles.sizes[1] > dim) refuse("cos turns more dims than a head has");
    typed(in, [&](auto element) {
      using T = decltype(element);
      RotateAndCache<T> op{
          .qkv = in.as<T>("qkv"),
          .tokens = tokens,
          .query_heads = query_heads,
          .kv_heads = heads,
          .dim = dim,
          .half = angles.sizes[1],
          .slots = keys.sizes[0] * keys.sizes[1],
          .cos = angles.as<float>("cos"),
          .sin = Array(sin).expect("sin", {tokens, angles.sizes[1]}).as<float>("sin"),
          .interleaved = interleaved != 0,
          .q_norm = vector_or_null<T>("q_norm", q_norm, dim),
          .k_norm = vector_or_null<T>("k_norm", k_norm, dim),
          .eps = eps,
          .slot_mapping = Array(slots).expect("slot_mapping", {tokens}).as<int32_t>("slot_mapping"),
          .key = keys.as<T>("key"),
          .value = Array(value).expect("value", {keys.sizes[0], keys.sizes[1], heads, dim}).as<T>("value"),
          .out = make(out, {tokens, query_heads, dim}, in.type).template as<T>("out")};
      op.run();
    });
  });
}

AOTITorchError aoti_torch_cpu_air_attention(Handle q, Handle key, Handle value, Handle positions, Handle q_cu_len,
                                            Handle kv_len, const Handle* block_table, const Handle* sinks, double scale,
                                            int64_t window, Handle* out) {
  return guarded([&] {
    Array keys = Array(key).expect("key", {-1, -1, -1, -1});
    Array in = Array(q).expect("q", {-1, -1, keys.sizes[3]}), lengths = Array(kv_len).expect("kv_len", {-1});
    int64_t rows = lengths.sizes[0], heads = keys.sizes[2], dim = keys.sizes[3];
    if (in.sizes[1] % heads) refuse("query heads are no multiple of the kv heads");
    typed(in, [&](auto element) {
      using T = decltype(element);
      Attention<T> op{.q = in.as<T>("q"),
                      .key = keys.as<T>("key"),
                      .value = Array(value).expect("value", {keys.sizes[0], keys.sizes[1], heads, dim}).as<T>("value"),
                      .tokens = in.sizes[0],
                      .rows = rows,
                      .query_heads = in.sizes[1],
                      .kv_heads = heads,
                      .dim = dim,
                      .blocks = keys.sizes[0],
                      .block_size = keys.sizes[1],
                      .positions = Array(positions).expect("positions", {in.sizes[0]}).as<int32_t>("positions"),
                      .q_cu_len = Array(q_cu_len).expect("q_cu_len", {rows}).as<int32_t>("q_cu_len"),
                      .kv_len = lengths.as<int32_t>("kv_len"),
                      .block_table = nullptr,
                      .table_width = 0,
                      .sinks = vector_or_null<T>("sinks", sinks, in.sizes[1]),
                      .scale = float(scale),
                      .window = window,
                      .out = make(out, {in.sizes[0], in.sizes[1] * dim}, in.type).template as<T>("out")};
      if (block_table) {
        Array table = Array(*block_table).expect("block_table", {rows, -1});
        op.block_table = table.as<int32_t>("block_table"), op.table_width = table.sizes[1];
      }
      op.run();
    });
  });
}

const char* airdecode_last_error() { return last_error.c_str(); }

}  // extern "C"

// clang-format off
#define AIRDECODE_OPERATORS(OP)                                                                                     \
  OP(air_linear, "(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int columns, int wide) -> Tensor") \
  OP(air_gated_mlp, "(Tensor x, Tensor gate_up, Tensor? gate_up_scales, Tensor? gate_up_bias, Tensor down, " \
     "Tensor? down_scales, Tensor? down_bias, int width, int columns, int activation) -> Tensor") \
  OP(air_experts, "(Tensor x, Tensor weights, Tensor ids, Tensor live, Tensor? shared, Tensor gate_up, " \
     "Tensor? gate_up_scales, Tensor? gate_up_bias, Tensor down, Tensor? down_scales, Tensor? down_bias, " \
     "int num_experts, int width, int identity, int activation, float alpha, float limit) -> Tensor") \
  OP(air_rows, "(Tensor weight, Tensor? scales, Tensor ids, int columns, int depth, int wide) -> Tensor") \
  OP(air_rms_norm, "(Tensor x, Tensor weight, float eps) -> Tensor")                                                \
  OP(air_add_rms_norm, "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")                 \
  OP(air_argmax, "(Tensor logits) -> Tensor")                                                                       \
  OP(air_likeliest, "(Tensor scores, Tensor weights, Tensor top_k, Tensor top_p) -> Tensor")                        \
  OP(air_rotate_and_cache,                                                                                          \
     "(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) key, Tensor(b!) value, Tensor slots, Tensor? q_norm, "        \
     "Tensor? k_norm, int query_heads, int interleaved, float eps) -> Tensor")                                      \
  OP(air_attention,                                                                                                 \
     "(Tensor q, Tensor key, Tensor value, Tensor positions, Tensor q_cu_len, Tensor kv_len, Tensor? block_table, " \
     "Tensor? sinks, float scale, int window) -> Tensor")

#define DEFINE(name, schema) library.def(#name schema);
#define IMPLEMENT(name, schema) library.impl(#name, Boxed<&aoti_torch_cpu_##name>::call);

STABLE_TORCH_LIBRARY(airdecode, library) { AIRDECODE_OPERATORS(DEFINE) }
STABLE_TORCH_LIBRARY_IMPL(airdecode, CPU, library) { AIRDECODE_OPERATORS(IMPLEMENT) }
