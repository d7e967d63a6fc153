// Latent attention, absorbed: queries meet the compressed cache as it is, a chunk of keys at a time, packed once for all
// heads and read as keys and as values. A row with few queries (decode) is split into segments of keys, which threads
// share and which are merged; how depends on that row alone: its result is the same in any batch and on any threads.
#include "latent.h"

#include <cmath>
#include <stdexcept>
#include <vector>

namespace airdecode {
namespace {

constexpr int64_t kFewTokens = 4;         // up to here a row is split by keys
constexpr int64_t kQueryRows = 128;       // rows of a query block: enough to pay for packing the keys
constexpr int64_t kSegments = 16;         // of one row at most: each costs H * R numbers to merge
constexpr int64_t kWaveFloats = 1 << 24;  // of partial results held at once

struct Task {  // some tokens of one row and their keys: positions 0..keys-1, or those of a list
  int64_t row, token, count, keys, segments;
  const int32_t* list;
  int64_t partials = 0;  // where its segments' results lie

  int64_t first_chunk(int64_t segment) const { return ceil_div(keys, kChunk) * segment / segments; }
};
struct Item {
  int64_t task, segment;
};

// Query rows of a task, row r is token r / heads, and what they have seen so far.
template <class T>
class Block {
 public:
  int64_t rows, width;           // width: rank rounded up to whole groups
  float *largest, *total, *out;  // [rows], [rows], [rows, width]

  Block(const LatentAttention<T>& op, const Task& task)
      : rows(task.count * op.heads), width(ceil_div(op.rank, kColumns) * kColumns), op_(op), task_(task),
        first_(ceil_div(op.rank, 32)), tiles_(first_ + ceil_div(op.rope, 32)), scope_(rows) {
    int64_t padded = ceil_div(rows, 16) * 16;
    queries_ = scratch<T>(kQueries, left_size(queries_, rows, tiles_ * 32));
    scores_ = scratch<float>(kScores, padded * (kChunk + width + 3));
    out = scores_ + padded * kChunk, largest = out + padded * width, total = largest + padded, fade_ = total + padded;
    weights_ = scratch<T>(kWeights, left_size(weights_, rows, kChunk));
    keys_ = scratch<T>(kKeys, kChunk / kColumns * group_size(keys_, tiles_ * 32));
    values_ = scratch<T>(kValues, width / kColumns * group_size(values_, kChunk));
    zeros_ = zeros_of<T>(std::max(op.rank, op.rope));
    pack_tiles(op.q + task.token * op.heads * op.rank, op.rank, op.rank, rows, 0, tiles_, queries_);
    pack_tiles(op.q_rotated + task.token * op.heads * op.rope, op.rope, op.rope, rows, first_, tiles_, queries_);
    std::fill(largest, largest + rows, -INFINITY);
    std::fill(total, total + rows, 0.0f);
    std::fill(out, out + rows * width, 0.0f);
  }

  void meet(int64_t chunk) {
    int64_t first = chunk * kChunk;
    KeyChunk source = keys_at(first);
    source.pack_keys(op_.latent, op_.rank, 0, tiles_, zeros_, keys_);
    source.pack_keys(op_.rotated, op_.rope, first_, tiles_, zeros_, keys_);
    source.pack_values(op_.latent, op_.rank, zeros_, values_);
    if (first + kChunk < task_.keys) keys_at(first + kChunk).fetch(op_.latent, op_.rank);
    score(source.depth);
    for (int64_t row = 0; row < rows; ++row) soften(row, first, source.depth);
    add(source.depth);
  }

 private:
  KeyChunk keys_at(int64_t first) const {
    return KeyChunk(op_.step, task_.row, task_.list, first, std::min(first + kChunk, task_.keys));
  }

  void score(int64_t depth) {
    for (int64_t key = 0; key < depth; key += kColumns)
      for (int64_t row = 0; row < rows; row += kBlockRows)
        tile_sums(scope_, Product<T>{.left = queries_,
                                     .depth = tiles_ * 32,
                                     .row = row,
                                     .rows = int(std::min<int64_t>(kBlockRows, rows - row)),
                                     .group = keys_ + key / kColumns * group_size(keys_, tiles_ * 32),
                                     .sums = scores_ + row * kChunk + key,
                                     .stride = kChunk});
  }

  void soften(int64_t row, int64_t first, int64_t depth) {
    int64_t seen = task_.list ? task_.keys : op_.step.seen(task_.row, task_.token + row / op_.heads);
    soften_row(scores_ + row * kChunk, depth, 0, int32_t(seen - first), op_.scale, weights_, row, largest[row], total[row],
               fade_[row]);
  }

  void add(int64_t depth) {
    alignas(64) float sums[kBlockRows * kColumns];
    for (int64_t at = 0; at < width; at += kColumns)
      for (int64_t row = 0; row < rows; row += kBlockRows) {
        int block = int(std::min<int64_t>(kBlockRows, rows - row));
        const T* group = values_ + at / kColumns * group_size(values_, depth);
        tile_sums(scope_, Product<T>{.left = weights_,
                                     .depth = depth,
                                     .row = row,
                                     .rows = block,
                                     .group = group,
                                     .sums = sums});
        for (int i = 0; i < block; ++i)
          for (int j = 0; j < kColumns; j += 16) {
            float* to = out + (row + i) * width + at + j;
            store16(to, load16(to) * fade_[row + i] + load16(sums + i * kColumns + j));
          }
      }
  }

  const LatentAttention<T>& op_;
  const Task& task_;
  const int64_t first_, tiles_;  // of the depth: where the rotated part begins, and all
  TileScope scope_;
  T *queries_, *weights_, *keys_, *values_;
  const T* zeros_;
  float *scores_, *fade_;  // [rows, kChunk], [rows]
};

template <class T>
class Plan {
 public:
  explicit Plan(const LatentAttention<T>& op) : op_(op) {
    if (op.selected) list();
    op.step.each([&](int64_t row, int64_t token, int64_t end) {
      bool split = end - token <= kFewTokens;
      int64_t step = op.selected ? 1 : split ? kFewTokens : std::max<int64_t>(1, kQueryRows / op.heads);
      for (; token < end; token += step) {
        Task task{.row = row, .token = token, .count = std::min(step, end - token), .keys = 0, .segments = 1};
        for (int64_t i = 0; i < task.count; ++i) task.keys = std::max(task.keys, op.step.seen(row, token + i));
        if (op.selected) task.list = lists_ + token * op.top, task.keys = listed_[token];
        if (split) task.segments = std::clamp<int64_t>(ceil_div(task.keys, kChunk), 1, kSegments);
        tasks_.push_back(task);
      }
    });
  }

  void run() {
    for (int64_t first = 0, end = 0; first < int64_t(tasks_.size()); first = end) {
      int64_t size = 0;
      std::vector<Item> items, merges;
      double work = 0;
      for (; end < int64_t(tasks_.size()) && size <= kWaveFloats; ++end) {
        Task& task = tasks_[end];
        task.partials = size;
        for (int64_t i = 0; i < task.segments; ++i) items.push_back({end, i});
        if (task.segments > 1) {
          size += task.segments * task.count * op_.heads * part_size();
          for (int64_t i = 0; i < task.count * op_.heads; ++i) merges.push_back({end, i});
        }
        work += double(task.keys) * (op_.rank + op_.rope);
      }
      partials_ = scratch<float>(kPartials, size);
      parallel(int64_t(items.size()), work, [&](Units& units, int thread) {
        for (int64_t i; (i = units.take(thread)) >= 0;) segment(tasks_[items[i].task], items[i].segment);
      });
      parallel(int64_t(merges.size()), double(size) / 4, [&](Units& units, int thread) {
        for (int64_t i; (i = units.take(thread)) >= 0;) merge(tasks_[merges[i].task], merges[i].segment);
      });
    }
  }

 private:
  // A partial result: of each row the largest score, the sum of weights, and `width` numbers.
  int64_t part_size() const { return ceil_div(op_.rank, kColumns) * kColumns + 2; }
  float* part(const Task& task, int64_t segment, int64_t row) const {
    return partials_ + task.partials + (segment * task.count * op_.heads + row) * part_size();
  }

  // The positions that each token selected and may see.
  void list() {
    lists_ = scratch<int32_t>(kPlaces, op_.step.tokens * op_.top);
    listed_.resize(op_.step.tokens);
    op_.step.each([&](int64_t row, int64_t token, int64_t end) {
      for (; token < end; ++token)
        for (int64_t i = 0, seen = op_.step.seen(row, token); i < op_.top; ++i) {
          int32_t position = op_.selected[token * op_.top + i];
          if (position >= 0 && position < seen) lists_[token * op_.top + listed_[token]++] = position;
        }
    });
  }

  void segment(const Task& task, int64_t segment) const {
    Block<T> block(op_, task);
    for (int64_t chunk = task.first_chunk(segment); chunk < task.first_chunk(segment + 1); ++chunk) block.meet(chunk);
    for (int64_t row = 0; row < block.rows; ++row) {
      const float* out = block.out + row * block.width;
      if (task.segments == 1) {
        finish(task, row, block.total[row], [&](int64_t at) { return load16(out + at); });
      } else {
        float* to = part(task, segment, row);
        to[0] = block.largest[row], to[1] = block.total[row];
        std::memcpy(to + 2, out, block.width * sizeof(float));
      }
    }
  }

  void merge(const Task& task, int64_t row) const {
    float largest = -INFINITY, total = 0, share[kSegments];
    for (int64_t i = 0; i < task.segments; ++i) largest = std::max(largest, part(task, i, row)[0]);
    for (int64_t i = 0; i < task.segments; ++i) {
      share[i] = largest == -INFINITY ? 0.0f : std::exp(part(task, i, row)[0] - largest);
      total += share[i] * part(task, i, row)[1];
    }
    finish(task, row, total, [&](int64_t at) {
      f32x16 sum = {};
      for (int64_t i = 0; i < task.segments; ++i) sum += share[i] * load16(part(task, i, row) + 2 + at);
      return sum;
    });
  }

  // out = sums / total; zero where nothing was seen.
  template <class Sums>
  void finish(const Task& task, int64_t row, float total, Sums&& sums) const {
    float scale = total != 0 ? 1 / total : 0;
    T* to = op_.out + (task.token * op_.heads + row) * op_.rank;
    for (int64_t at = 0; at < op_.rank; at += 16) store(to + at, sums(at) * scale, op_.rank - at);
  }

  const LatentAttention<T>& op_;
  std::vector<Task> tasks_;
  std::vector<int64_t> listed_;
  int32_t* lists_ = nullptr;
  float* partials_ = nullptr;
};

}  // namespace

template <class T>
void LatentAttention<T>::run() const {
  Plan<T>(*this).run();
}

template struct LatentAttention<float>;
template struct LatentAttention<bf16>;

}  // namespace airdecode
