// The lightning indexer's choice, and one matrix a head. A score needs its own token and key only, so that they are
// worked out in any order, and only where a token sees more positions than it may choose.
#include <stdexcept>
#include <vector>

#include "latent.h"

namespace airdecode {
namespace {

constexpr int64_t kTokens = 4;            // of one row that share a chunk of packed keys
constexpr int64_t kWaveFloats = 1 << 24;  // of scores held at once

struct Task {  // some tokens of one row that choose among positions 0..keys-1
  int64_t row, token, count, keys;
  int64_t scores = 0;  // where they lie, [count, stride()]

  int64_t stride() const { return ceil_div(keys, kChunk) * kChunk; }
};
struct Item {
  int64_t task, chunk;
};

template <class T>
void score(const LatentSelect<T>& op, const Task& task, int64_t chunk, float* scores) {
  int64_t tiles = ceil_div(op.dim, 32);
  T* keys = scratch<T>(kKeys, kChunk / kColumns * group_size(keys, tiles * 32));
  T* queries = scratch<T>(kQueries, left_size(queries, op.heads, tiles * 32));
  float* products = scratch<float>(kScores, ceil_div(op.heads, 16) * 16 * kChunk);
  int64_t first = chunk * kChunk;
  KeyChunk source(op.step, task.row, nullptr, first, std::min(first + kChunk, task.keys));
  source.pack_keys(op.key, op.dim, 0, tiles, zeros_of<T>(op.dim), keys);
  TileScope scope(op.heads);
  for (int64_t i = 0; i < task.count; ++i) {
    int64_t token = task.token + i;
    pack_tiles(op.q + token * op.heads * op.dim, op.dim, op.dim, op.heads, 0, tiles, queries);
    for (int64_t key = 0; key < source.depth; key += kColumns)
      for (int64_t row = 0; row < op.heads; row += kBlockRows)
        tile_sums(scope, Product<T>{.left = queries,
                                    .depth = tiles * 32,
                                    .row = row,
                                    .rows = int(std::min<int64_t>(kBlockRows, op.heads - row)),
                                    .group = keys + key / kColumns * group_size(keys, tiles * 32),
                                    .sums = products + row * kChunk + key,
                                    .stride = kChunk});
    for (int64_t key = 0; key < source.depth; key += 16) {
      f32x16 sum = {};
      for (int64_t head = 0; head < op.heads; ++head)
        sum += max16(load16(products + head * kChunk + key), f32x16{}) * op.head_weights[token * op.heads + head];
      store16(scores + i * task.stride() + first + key, sum == sum ? sum : splat(-INFINITY));
    }
  }
}

// The `top` best of scores [seen], the earlier of equals, in rising order of position.
void choose(const float* scores, int64_t seen, int64_t top, int32_t* out) {
  float* order = scratch<float>(kOrder, seen);
  std::copy(scores, scores + seen, order);
  std::nth_element(order, order + top - 1, order + seen, std::greater<float>());
  float least = order[top - 1];
  int64_t equals = top - std::count_if(order, order + top, [&](float score) { return score > least; });
  for (int64_t i = 0, taken = 0; taken < top; ++i)
    if (scores[i] > least || (scores[i] == least && equals-- > 0)) out[taken++] = int32_t(i);
}

}  // namespace

template <class T>
void LatentSelect<T>::run() const {
  std::vector<Task> tasks;
  step.each([&](int64_t row, int64_t token, int64_t end) {
    for (int64_t i = token; i < end; ++i) {
      int64_t seen = step.seen(row, i);
      if (seen <= top) {
        for (int64_t at = 0; at < top; ++at) out[i * top + at] = at < seen ? int32_t(at) : -1;
      } else if (tasks.empty() || tasks.back().row != row || tasks.back().count == kTokens) {
        tasks.push_back({row, i, 1, seen});
      } else {
        tasks.back().count = i + 1 - tasks.back().token;
        tasks.back().keys = std::max(tasks.back().keys, seen);
      }
    }
  });
  for (int64_t first = 0, end = 0; first < int64_t(tasks.size()); first = end) {
    std::vector<Item> items, choices;
    int64_t size = 0;
    for (; end < int64_t(tasks.size()) && size <= kWaveFloats; ++end) {
      Task& task = tasks[end];
      task.scores = size;
      size += task.count * task.stride();
      for (int64_t i = 0; i < task.stride() / kChunk; ++i) items.push_back({end, i});
      for (int64_t i = 0; i < task.count; ++i) choices.push_back({end, i});
    }
    float* scores = scratch<float>(kPartials, size);
    parallel(int64_t(items.size()), double(size) * heads * dim / 64, [&](Units& units, int thread) {
      for (int64_t i; (i = units.take(thread)) >= 0;) {
        const Task& task = tasks[items[i].task];
        score(*this, task, items[i].chunk, scores + task.scores);
      }
    });
    parallel(int64_t(choices.size()), double(size) * 4, [&](Units& units, int thread) {
      for (int64_t i; (i = units.take(thread)) >= 0;) {
        const Task& task = tasks[choices[i].task];
        int64_t token = task.token + choices[i].chunk;
        choose(scores + task.scores + choices[i].chunk * task.stride(), step.seen(task.row, token), top,
               out + token * top);
      }
    });
  }
}

template <class T>
void HeadLinear<T>::run() const {
  int64_t stride = ceil_div(columns, kColumns) * group_size(groups, depth);
  parallel(heads, double(heads * columns * depth) / 12 * (1 + double(tokens) / 64), [&](Units& units, int thread) {
    TileScope scope(tokens);
    T* left = scratch<T>(kQueries, left_size(left, tokens, depth));
    alignas(64) float sums[kBlockRows * kColumns];
    for (int64_t head; (head = units.take(thread)) >= 0;) {
      pack_left(x + head * head_stride, token_stride, depth, 0, tokens, left);
      for (int64_t column = 0; column < columns; column += kColumns)
        for (int64_t row = 0; row < tokens; row += kBlockRows) {
          int block = int(std::min<int64_t>(kBlockRows, tokens - row));
          const T* group = groups + head * stride + column / kColumns * group_size(groups, depth);
          tile_sums(scope, Product<T>{
                               .left = left, .depth = depth, .row = row, .rows = block, .group = group, .sums = sums});
          for (int i = 0; i < block; ++i)
            for (int64_t at = column; at < std::min(columns, column + kColumns); at += 16)
              store(out + ((row + i) * heads + head) * columns + at, load16(sums + i * kColumns + at % kColumns),
                    columns - at);
        }
    }
  });
}

template struct LatentSelect<float>;
template struct LatentSelect<bf16>;
template struct HeadLinear<float>;
template struct HeadLinear<bf16>;

}  // namespace airdecode
