// How an operator meets torch: tensors as plain facts, checks, results, and one C function made callable both ways.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "simd.h"

namespace airdecode {

using Handle = AtenTensorHandle;

[[noreturn]] inline void refuse(const std::string& why) { throw std::runtime_error("airdecode operator: " + why); }

inline void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) refuse("torch refused a call");
}

// A tensor's facts; it owns nothing.
struct Array {
  void* data = nullptr;
  int64_t dims = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t type = 0;

  explicit Array(Handle handle) {
    check(aoti_torch_get_data_ptr(handle, &data));
    check(aoti_torch_get_dim(handle, &dims));
    check(aoti_torch_get_sizes(handle, &sizes));
    check(aoti_torch_get_strides(handle, &strides));
    check(aoti_torch_get_dtype(handle, &type));
  }

  // Refuses other shapes (-1 fits any size) and anything but rows of contiguous memory; returns itself.
  const Array& expect(const char* name, std::initializer_list<int64_t> shape, bool rows_may_stride = false) const {
    bool fits = dims == int64_t(shape.size());
    int64_t step = 1;
    for (int64_t i = dims - 1; fits && i >= 0; step *= sizes[i--]) {
      int64_t wanted = shape.begin()[i];
      fits = wanted < 0 || wanted == sizes[i];
      if (sizes[i] != 1 && strides[i] != step) fits = fits && rows_may_stride && i == 0 && dims == 2;
    }
    if (!fits) refuse(std::string(name) + " has another shape or layout than the operator takes");
    return *this;
  }
  template <class T>
  T* as(const char* name) const {
    static const int32_t wanted = std::is_same_v<T, float>     ? aoti_torch_dtype_float32()
                                  : std::is_same_v<T, bool>    ? aoti_torch_dtype_bool()
                                  : std::is_same_v<T, int32_t> ? aoti_torch_dtype_int32()
                                                               : aoti_torch_dtype_bfloat16();
    if (type != wanted) refuse(std::string(name) + " has another dtype than the operator takes");
    return static_cast<T*>(data);
  }
};

inline Array make(Handle* out, std::initializer_list<int64_t> shape, int32_t type) {
  int64_t strides[4], step = 1;
  for (int64_t i = int64_t(shape.size()) - 1; i >= 0; step *= shape.begin()[i--]) strides[i] = step;
  check(aoti_torch_empty_strided(int64_t(shape.size()), shape.begin(), strides, type, aoti_torch_device_type_cpu(), 0,
                                 out));
  return Array(*out);
}

// Calls body with a value of the element type: float or bf16.
template <class Body>
void typed(const Array& array, Body&& body) {
  if (array.type == aoti_torch_dtype_float32()) return body(float());
  if (array.type == aoti_torch_dtype_bfloat16()) return body(bf16());
  refuse("activations must be float32 or bfloat16");
}

inline thread_local std::string last_error;

// An exception must not cross into compiled code: it becomes the error code that torch's macros understand.
template <class Body>
AOTITorchError guarded(Body&& body) {
  try {
    body();
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    last_error = error.what();
    return AOTI_TORCH_FAILURE;
  }
}

// -- The C function as the dispatcher calls it: a stack of values in, a stack of results out --------------------------
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// One argument as the C function takes it, and what must live until the call is over.
template <class C>
struct Argument;
template <>
struct Argument<Handle> {
  Tensor tensor;
  explicit Argument(StableIValue value) : tensor(to<Tensor>(value)) {}
  Handle get() { return tensor.get(); }
};
template <>
struct Argument<const Handle*> {
  std::optional<Tensor> tensor;
  Handle handle = nullptr;
  explicit Argument(StableIValue value) : tensor(to<std::optional<Tensor>>(value)) {}
  const Handle* get() { return tensor ? (handle = tensor->get(), &handle) : nullptr; }
};
template <>
struct Argument<int64_t> {
  int64_t value;
  explicit Argument(StableIValue value) : value(to<int64_t>(value)) {}
  int64_t get() { return value; }
};
template <>
struct Argument<double> {
  double value;
  explicit Argument(StableIValue value) : value(to<double>(value)) {}
  double get() { return value; }
};
template <>
struct Argument<Handle*> {  // a result
  Handle handle = nullptr;
  explicit Argument(StableIValue) {}
  Handle* get() { return &handle; }
};

template <auto function, class Function = decltype(function)>
struct Boxed;
template <auto function, class... C>
struct Boxed<function, AOTITorchError (*)(C...)> {
  static void call(StableIValue* stack, uint64_t num_arguments, uint64_t) {
    run(stack, num_arguments, std::index_sequence_for<C...>());
  }

  template <size_t... I>
  static void run(StableIValue* stack, uint64_t num_arguments, std::index_sequence<I...>) {
    std::tuple<Argument<C>...> arguments{Argument<C>(I < num_arguments ? stack[I] : StableIValue())...};
    if (function(std::get<I>(arguments).get()...) != AOTI_TORCH_SUCCESS) throw std::runtime_error(last_error);
    size_t result = 0;
    (give(stack, result, std::get<I>(arguments)), ...);
  }
  template <class A>
  static void give(StableIValue* stack, size_t& result, A& argument) {
    if constexpr (std::is_same_v<A, Argument<Handle*>>) stack[result++] = from(Tensor(argument.handle));
  }
};

}  // namespace airdecode
