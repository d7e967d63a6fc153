#include "pool.h"

#include <pthread.h>
#include <torch/csrc/stable/c/shim.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

namespace airdecode {
namespace {

constexpr int64_t kSpinNanoseconds = 100'000;  // longer than any pause inside a step, shorter than a scheduler's slice

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `done()` or the time is up; true if done.
template <class Done>
bool spin(Done&& done) {
  auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      relax();
    }
  } while ((std::chrono::steady_clock::now() - start).count() < kSpinNanoseconds);
  return false;
}

class Pool {
 public:
  void run(int threads, void (*body)(void*, int), void* context) {
    std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    if (!alone) return body(context, 0);
    for (; started_ < threads - 1; ++started_) std::thread(&Pool::work, this, started_ + 1).detach();
    body_ = body, context_ = context, threads_ = threads;
    door_.store(kOpen, std::memory_order_release);
    job_.fetch_add(1);
    job_.notify_all();
    body(context, 0);
    uint32_t inside = door_.fetch_and(~kOpen) & ~kOpen;
    if (!inside || spin([&] { return !door_.load(std::memory_order_acquire); })) return;
    while ((inside = door_.load(std::memory_order_acquire))) door_.wait(inside);
  }

 private:
  static constexpr uint32_t kOpen = 1, kOne = 2;  // door_: open or not, and twice the number inside

  void work(int thread) {
    for (uint32_t seen = 0;;) {
      if (!spin([&] { return job_.load(std::memory_order_acquire) != seen; })) job_.wait(seen);
      seen = job_.load(std::memory_order_acquire);
      if (!enter()) continue;
      if (thread < threads_) body_(context_, thread);
      if (door_.fetch_sub(kOne) == kOne) door_.notify_one();
    }
  }

  bool enter() {
    uint32_t door = door_.load(std::memory_order_acquire);
    while (door & kOpen)
      if (door_.compare_exchange_weak(door, door + kOne)) return true;
    return false;
  }

  std::mutex busy_;
  int started_ = 0;
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int threads_ = 0;
  alignas(64) std::atomic<uint32_t> door_{0};
  alignas(64) std::atomic<uint32_t> job_{0};
};

// Never destroyed: its threads outlive the program's own destructors. A forked child has none of them and makes its
// own.
Pool* pool = new Pool;
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

struct Scratch {
  void* data[kScratchTags] = {};
  size_t size[kScratchTags] = {};
  ~Scratch() {
    for (void* block : data) std::free(block);
  }
};
thread_local Scratch scratches;

}  // namespace

int pool_threads() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads < 1 ? 1 : threads > Units::kMaxThreads ? Units::kMaxThreads : int(threads);
}

void pool_run(int threads, void (*body)(void*, int), void* context) { pool->run(threads, body, context); }

void* scratch_bytes(int tag, size_t bytes) {
  if (scratches.size[tag] < bytes) {
    std::free(scratches.data[tag]);
    scratches.data[tag] = nullptr;
    size_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    scratches.data[tag] = std::aligned_alloc(4096, rounded);
    scratches.size[tag] = scratches.data[tag] ? rounded : 0;
    if (!scratches.data[tag]) throw std::bad_alloc();
  }
  return scratches.data[tag];
}

}  // namespace airdecode
