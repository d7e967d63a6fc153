// Runs an AOTInductor library on fixed inputs. Promises: a run converts nothing, allocates no Python object and holds no
// interpreter lock (it is called through ctypes). Knows nothing of models or shapes.
//
// The C interface of such a library is torch's own (torch/csrc/inductor/aoti_runtime/interface.h).

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

namespace {

struct NamedHandle {  // AOTInductorConstantMapEntry of interface.h
  const char* name;
  AtenTensorHandle handle;
};

using Container = void*;
using Error = int32_t;

struct Graph {
  void* library = nullptr;
  Container container = nullptr;
  std::vector<const char*> names;      // of the constants, as the library spells them
  std::vector<const char*> fqns;       // of the same, as the module spells them
  std::vector<AtenTensorHandle> weights;  // owned references to the constants' tensors
  std::vector<AtenTensorHandle> bound;    // owned references to the fixed inputs
  std::vector<AtenTensorHandle> taken; // one run's handles: the library steals them
  std::vector<AtenTensorHandle> outputs;
  Error (*run)(Container, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t, void*, void*) = nullptr;
};

template <class F>
bool find(void* library, const char* name, F& function, std::string& why) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function) why = std::string("the library lacks ") + name;
  return function != nullptr;
}

int fail(const std::string& why, char* message, size_t size) {
  std::snprintf(message, size, "%s", why.c_str());
  return 1;
}

}  // namespace

extern "C" {

void airdecode_graph_close(void* pointer) {
  auto* graph = static_cast<Graph*>(pointer);
  if (!graph) return;
  Error (*remove)(Container) = nullptr;
  std::string why;
  if (graph->container && find(graph->library, "AOTInductorModelContainerDelete", remove, why)) remove(graph->container);
  for (auto* handles : {&graph->weights, &graph->bound})
    for (AtenTensorHandle handle : *handles) aoti_torch_delete_tensor_object(handle);
  if (graph->library) dlclose(graph->library);
  delete graph;
}

// Opens the library and makes its container. On failure returns null with the reason in `message`.
void* airdecode_graph_open(const char* path, const char* folder, char* message, size_t size) {
  auto* graph = new Graph;
  std::string why;
  Error (*create)(Container*, size_t, const char*, const char*) = nullptr;
  Error (*count)(Container, size_t*) = nullptr;
  Error (*count_outputs)(Container, size_t*) = nullptr;
  Error (*name_of)(Container, size_t, const char**) = nullptr;
  Error (*fqn_of)(Container, size_t, const char**) = nullptr;
  graph->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!graph->library) why = dlerror();
  const bool found = graph->library && find(graph->library, "AOTInductorModelContainerCreateWithDevice", create, why) &&
                     find(graph->library, "AOTInductorModelContainerGetNumConstants", count, why) &&
                     find(graph->library, "AOTInductorModelContainerGetNumOutputs", count_outputs, why) &&
                     find(graph->library, "AOTInductorModelContainerGetConstantName", name_of, why) &&
                     find(graph->library, "AOTInductorModelContainerGetConstantOriginalFQN", fqn_of, why) &&
                     find(graph->library, "AOTInductorModelContainerRunSingleThreaded", graph->run, why);
  size_t constants = 0, outputs = 0;
  if (found && (create(&graph->container, 1, "cpu", folder) || count(graph->container, &constants) ||
                count_outputs(graph->container, &outputs)))
    why = "the library's container could not be made";
  if (!found || !why.empty()) {
    fail(why, message, size);
    airdecode_graph_close(graph);
    return nullptr;
  }
  graph->names.resize(constants);
  graph->fqns.resize(constants);
  graph->outputs.resize(outputs);
  for (size_t i = 0; i < constants; ++i) {
    name_of(graph->container, i, &graph->names[i]);
    fqn_of(graph->container, i, &graph->fqns[i]);
  }
  return graph;
}

size_t airdecode_graph_num_constants(void* graph) { return static_cast<Graph*>(graph)->fqns.size(); }
const char* airdecode_graph_constant(void* graph, size_t i) { return static_cast<Graph*>(graph)->fqns[i]; }

// Gives the graph its weights (in the order of airdecode_graph_constant) and its inputs. Nothing is copied: the graph
// takes over the handles, each of which keeps its tensor alive and in place.
int airdecode_graph_bind(void* pointer, AtenTensorHandle* constants, AtenTensorHandle* inputs, size_t num_inputs,
                         char* message, size_t size) {
  auto* graph = static_cast<Graph*>(pointer);
  Error (*count)(Container, size_t*) = nullptr;
  Error (*update)(Container, const NamedHandle*, size_t, bool, bool) = nullptr;
  std::string why;
  graph->weights.assign(constants, constants + graph->names.size());
  graph->bound.assign(inputs, inputs + num_inputs);
  if (!find(graph->library, "AOTInductorModelContainerGetNumInputs", count, why) ||
      !find(graph->library, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs", update, why))
    return fail(why, message, size);
  size_t wanted = 0;
  count(graph->container, &wanted);
  if (wanted != num_inputs)
    return fail("the graph takes " + std::to_string(wanted) + " inputs, " + std::to_string(num_inputs) + " were given",
                message, size);
  std::vector<NamedHandle> pairs(graph->names.size());
  for (size_t i = 0; i < pairs.size(); ++i) pairs[i] = {graph->names[i], constants[i]};
  if (!pairs.empty() && update(graph->container, pairs.data(), pairs.size(), false, true))
    return fail("the weights were refused", message, size);
  graph->taken.resize(num_inputs);
  return 0;
}

// One step. Returns 0, or 1 with torch's own message on standard error.
int airdecode_graph_run(void* pointer) {
  auto* graph = static_cast<Graph*>(pointer);
  for (size_t i = 0; i < graph->bound.size(); ++i)
    if (aoti_torch_new_tensor_handle(graph->bound[i], &graph->taken[i])) return 1;
  std::fill(graph->outputs.begin(), graph->outputs.end(), nullptr);
  const Error error = graph->run(graph->container, graph->taken.data(), graph->taken.size(), graph->outputs.data(),
                                 graph->outputs.size(), nullptr, nullptr);
  for (AtenTensorHandle output : graph->outputs)  // all results land in inputs; what is returned is an alias of one
    if (output) aoti_torch_delete_tensor_object(output);
  return error != 0;
}

}  // extern "C"
