// Reads a buffer once with some threads, as fast as the memory gives it: what no decode step can beat.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sys/mman.h>

#ifndef _OPENMP
#error "without OpenMP one thread would read, and the floor would be too high"
#endif

namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kStreams = 2;  // runs of addresses that one thread reads side by side: faster than 1, 4 and 8

std::uint64_t sum_streams(const std::uint64_t* data, std::size_t count) {
  const std::size_t part = count / kStreams / 8 * 8;
  std::uint64_t total[8] = {};
  for (std::size_t i = 0; i < part; i += 8)
    for (std::size_t stream = 0; stream < kStreams; ++stream)
      for (std::size_t lane = 0; lane < 8; ++lane) total[lane] ^= data[stream * part + i + lane];
  for (std::size_t i = kStreams * part; i < count; ++i) total[0] ^= data[i];
  std::uint64_t sum = 0;
  for (std::uint64_t lane : total) sum ^= lane;
  return sum;
}
}  // namespace

extern "C" {
// Memory in huge pages where the system gives them; each thread touches first what it will read. Null if there is none.
void* reader_allocate(std::size_t bytes, int threads) {
  const std::size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  auto* data = static_cast<std::uint64_t*>(std::aligned_alloc(kHugePage, size));
  if (data == nullptr) return nullptr;
  madvise(data, size, MADV_HUGEPAGE);
  const std::ptrdiff_t count = static_cast<std::ptrdiff_t>(size / 8);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (std::ptrdiff_t i = 0; i < count; ++i) data[i] = static_cast<std::uint64_t>(i);
  return data;
}

std::uint64_t reader_sweep(const void* buffer, std::size_t bytes, int threads) {
  const auto* data = static_cast<const std::uint64_t*>(buffer);
  const std::size_t share = bytes / 8 / threads;
  std::uint64_t total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(^ : total)
  for (int thread = 0; thread < threads; ++thread) total ^= sum_streams(data + thread * share, share);
  return total;
}

void reader_free(void* buffer) { std::free(buffer); }
}
