// One pool of threads for all kernels. It promises that a loop ends as soon as its units are done, never later because
// a thread could not start: the caller works too, and waits only for threads that are inside a unit. Idle threads spin
// for a moment (the next kernel comes in microseconds) and then sleep, so a busy neighbour costs its share and no more.
#pragma once

#include <atomic>
#include <cstdint>

namespace airdecode {

// Hands out units 0..count-1: to each thread a contiguous run, in order, then what others have left.
class Units {
 public:
  static constexpr int kMaxThreads = 64;

  Units(int64_t count, int threads) : threads_(threads) {
    for (int t = 0; t < threads; ++t) runs_[t].next = count * t / threads, runs_[t].end = count * (t + 1) / threads;
  }

  // The next unit for `thread`, or -1 when none is left.
  int64_t take(int thread) {
    int64_t count;
    return take(thread, 1, count);
  }

  // The same for up to `most` units, one behind the other; `count` of them.
  int64_t take(int thread, int64_t most, int64_t& count) {
    for (int i = 0; i < threads_; ++i) {
      Run& run = runs_[(thread + i) % threads_];
      if (run.next.load(std::memory_order_relaxed) >= run.end) continue;
      int64_t unit = run.next.fetch_add(most, std::memory_order_relaxed);
      count = run.end - unit < most ? run.end - unit : most;
      if (count > 0) return unit;
    }
    return -1;
  }

 private:
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Run runs_[kMaxThreads];
  int threads_;
};

int pool_threads();  // torch.get_num_threads(), at most Units::kMaxThreads

// Runs body(context, thread) on the calling thread as 0 and on up to threads - 1 others; returns when all have
// returned. Those who come after the caller is done find the door closed. A second caller at the same time works alone.
void pool_run(int threads, void (*body)(void* context, int thread), void* context);

// body(units, thread) takes units until none is left. `worth`: rough nanoseconds of all units; little work stays on
// this thread.
template <class Body>
void parallel(int64_t count, double worth, Body&& body) {
  int threads = worth < 8000 ? 1 : pool_threads();
  if (threads > count) threads = count > 1 ? int(count) : 1;
  Units units(count, threads);
  if (threads == 1) return body(units, 0);
  struct Context {
    Units& units;
    Body& body;
  } context{units, body};
  pool_run(
      threads,
      [](void* raw, int thread) {
        Context& context = *static_cast<Context*>(raw);
        context.body(context.units, thread);
      },
      &context);
}

// Uninitialised memory of one thread, for one purpose (the tag), kept between calls: kernels allocate nothing.
void* scratch_bytes(int tag, size_t bytes);
enum ScratchTag {
  kLhs,
  kHidden,
  kSums,
  kTileSums,
  kPartials,
  kScores,
  kKeys,
  kValues,
  kQueries,
  kWeights,
  kZeros,
  kBinsOfRow,
  kPlaces,
  kOrder,
  kScratchTags
};
template <class T>
T* scratch(ScratchTag tag, size_t count) {
  return static_cast<T*>(scratch_bytes(tag, count * sizeof(T)));
}

}  // namespace airdecode
