// A stream of work for one thread, which holds no interpreter lock: between two graphs of a step there are a few copies
// and nothing else. It promises order, and that after a failure the rest is skipped. It knows nothing of what it runs.
//
// Waking a sleeping thread costs more than a small copy, so the thread is woken for graphs, and when somebody waits.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

namespace {

struct Work {
  enum Kind { kCopy, kRun, kMark } kind;
  void* target;        // of a copy; of a run the argument; of a mark nothing
  const void* source;  // of a copy
  size_t size;         // of a copy, bytes; of a mark its number
  int (*run)(void*);
  double* clock;  // [2] when a run began and ended, seconds of the steady clock
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Stream {
  std::mutex mutex;
  std::condition_variable given, reached;
  std::deque<Work> work;
  uint64_t marks = 0;      // given
  uint64_t at = 0;         // reached
  uint64_t good = UINT64_MAX;  // marks up to this one were reached before a failure
  void* failed = nullptr;  // the argument of the run that failed
  bool closing = false;
  std::thread thread{[this] { serve(); }};

  void give(const Work& item, bool wake) {
    {
      std::lock_guard<std::mutex> hold(mutex);
      work.push_back(item);
    }
    if (wake) given.notify_one();
  }

  void serve() {
    std::unique_lock<std::mutex> hold(mutex);
    for (;;) {
      given.wait(hold, [this] { return !work.empty() || closing; });
      if (work.empty()) return;
      const Work item = work.front();
      work.pop_front();
      if (item.kind == Work::kMark) {
        at = item.size;
        reached.notify_all();
      } else if (good == UINT64_MAX) {
        hold.unlock();
        const bool ok = perform(item);
        hold.lock();
        if (!ok) {
          failed = item.target;
          good = at;
        }
      }
    }
  }

  static bool perform(const Work& item) {
    if (item.kind == Work::kCopy) {
      std::memcpy(item.target, item.source, item.size);
      return true;
    }
    item.clock[0] = now();
    const bool ok = item.run(item.target) == 0;
    item.clock[1] = now();
    return ok;
  }
};

Stream* of(void* pointer) { return static_cast<Stream*>(pointer); }

}  // namespace

extern "C" {

void* airdecode_stream_open() { return new Stream; }

void airdecode_stream_copy(void* stream, void* target, const void* source, size_t size) {
  of(stream)->give({Work::kCopy, target, source, size, nullptr, nullptr}, false);
}

void airdecode_stream_run(void* stream, int (*run)(void*), void* argument, double* clock) {
  of(stream)->give({Work::kRun, argument, nullptr, 0, run, clock}, true);
}

// The number of a mark behind all work given so far.
uint64_t airdecode_stream_record(void* stream) {
  const uint64_t mark = ++of(stream)->marks;
  of(stream)->give({Work::kMark, nullptr, nullptr, mark, nullptr, nullptr}, false);
  return mark;
}

// Wait for a mark; 0, or 1 where a run before it failed, with its argument.
int airdecode_stream_synchronize(void* stream, uint64_t mark, void** failed) {
  Stream* s = of(stream);
  std::unique_lock<std::mutex> hold(s->mutex);
  if (s->at < mark) {
    s->given.notify_one();
    s->reached.wait(hold, [&] { return s->at >= mark; });
  }
  *failed = s->failed;
  return mark > s->good;
}

// Do what was given, then end the thread.
void airdecode_stream_close(void* stream) {
  Stream* s = of(stream);
  {
    std::lock_guard<std::mutex> hold(s->mutex);
    s->closing = true;
  }
  s->given.notify_one();
  s->thread.join();
  delete s;
}

}  // extern "C"
