// Paged attention over all rows of a step. A row with few queries (decode) is split by chunks of keys, each read once
// for all heads, and merged (with a single query, see attention_lone.h); a row with many (prefill) by blocks of queries
// and kv heads. How a row is split depends on that row alone: its result is the same in any batch and on any number of
// threads.
#include <optional>
#include <stdexcept>
#include <vector>

#include "attention_block.h"
#include "attention_lone.h"

namespace airdecode {
namespace {

constexpr int64_t kFewTokens = 4;    // up to here a row is split by keys
constexpr int64_t kPartKeys = 64;    // of one part; fixed, so that results depend on nothing else
constexpr int64_t kQueryRows = 96;   // rows of a query block: enough to pay for packing the keys
constexpr int64_t kHeadDims = 1024;  // numbers a key that one item packs: its chunk stays in the second-level cache

struct Task {  // some tokens of one row, and the keys that they can see
  int64_t row, token, count, low, high;
  int64_t first_part = 0;  // of its partial results, where it is split
  bool split;

  int64_t size() const { return split ? kPartKeys : kChunk; }
  int64_t first_chunk() const { return low / size(); }
  int64_t chunks() const { return high > low ? ceil_div(high, size()) - first_chunk() : 0; }
};
struct Item {
  int64_t task, chunk, head;  // chunk is -1 where the item goes over all of them
};

template <class T>
class Plan {
 public:
  explicit Plan(const Attention<T>& op) : op_(op), heads_(std::clamp<int64_t>(kHeadDims / op.dim, 1, op.kv_heads)) {
    int64_t repeat = op.query_heads / op.kv_heads;
    for (int64_t row = 0, token = 0; row < op.rows; token = op.q_cu_len[row++]) {
      int64_t end = op.q_cu_len[row];
      if (end < token || end > op.tokens) throw std::runtime_error("attention: q_cu_len does not rise up to T");
      bool split = end - token <= kFewTokens;
      int64_t step = split ? kFewTokens : std::max<int64_t>(1, kQueryRows / repeat);
      for (; token < end; token += step) add(row, token, std::min(step, end - token), split);
    }
    partials_ = scratch<float>(kPartials, parts_ * part_size());
  }

  void run() {
    double keys = 0;
    for (const Task& task : tasks_) keys += double((task.high - task.low) * task.count);
    for (const Task& task : tasks_) all_lone_ &= lone(task);
    parallel(int64_t(items_.size()), keys * op_.kv_heads * op_.dim / 2, [&](Units& units, int thread) {
      std::optional<TileScope> scope;  // one for all parts: it takes a twentieth of the time of each
      if (all_lone_) scope.emplace(16);
      for (int64_t i, expected = -1; (i = units.take(thread)) >= 0; expected = i + 1)
        items_[i].chunk < 0 ? whole(tasks_[items_[i].task], items_[i].head) : part(items_[i], i == expected);
    });
    parallel(int64_t(tasks_.size()), double(parts_ * part_size()) / 4, [&](Units& units, int thread) {
      for (int64_t i; (i = units.take(thread)) >= 0;)
        if (tasks_[i].split) merge(tasks_[i]);
    });
  }

 private:
  // A partial result: for each token and query head the largest score, the sum of weights, and `width` numbers.
  int64_t width() const { return ceil_div(op_.dim, kColumns) * kColumns; }
  int64_t part_size() const { return kFewTokens * op_.query_heads * (width() + 2); }
  float* part_of(int64_t part, int64_t token, int64_t head) const {
    return partials_ + part * part_size() + (token * op_.query_heads + head) * (width() + 2);
  }

  void add(int64_t row, int64_t token, int64_t count, bool split) {
    Task task{row, token, count, op_.kv_len[row], 0, parts_, split};
    for (int64_t i = token; i < token + count; ++i) {
      int64_t high = std::min<int64_t>(op_.positions[i] + 1, op_.kv_len[row]);
      task.high = std::max(task.high, high);
      task.low = std::min(task.low, op_.window ? std::max<int64_t>(op_.positions[i] + 1 - op_.window, 0) : 0);
    }
    int64_t keys = op_.block_table ? op_.table_width * op_.block_size : op_.blocks / op_.rows * op_.block_size;
    if (task.high > keys) throw std::runtime_error("attention: kv_len is more than the row's blocks hold");
    int64_t number = int64_t(tasks_.size());
    for (int64_t head = 0; head < op_.kv_heads; head += split ? heads_ : 1)
      if (!split)
        items_.push_back({number, -1, head});
      else
        for (int64_t i = 0; i < task.chunks(); ++i) items_.push_back({number, i, head});
    if (split) parts_ += task.chunks();
    tasks_.push_back(task);
  }

  // `fetched`: the part before, on this thread, has fetched the keys.
  void part(const Item& item, bool fetched) const {
    const Task& task = tasks_[item.task];
    int64_t first = (task.first_chunk() + item.chunk) * kPartKeys, last = std::min(item.head + heads_, op_.kv_heads);
    int64_t next = first + kPartKeys < task.high ? first + kPartKeys : first;
    ChunkKeys<T> source(op_, task.row, first, kPartKeys, task.low, task.high);
    ChunkKeys<T> after(op_, task.row, next, kPartKeys, task.low, task.high);
    if (lone(task)) return lone_part(item, last, first, fetched && item.chunk, source, after);
    if (!fetched) source.fetch();
    QueryBlock<T> block(op_, task.token, task.count);
    TileScope scope(block.rows);
    T* keys = scratch<T>(kKeys, kChunk / kColumns * group_size(keys, op_.dim));
    T* values = scratch<T>(kValues, width() / kColumns * group_size(values, kChunk));
    for (int64_t head = item.head; head < last; ++head) {
      source.pack_keys(head, keys, &after);
      source.pack_values(head, values, &after);
      block.start(head);
      block.meet(scope, first, op_.kv_len[task.row], source.depth, keys, values);
      for (int64_t row = 0; row < block.rows; ++row) {
        float* to = part_of(task.first_part + item.chunk, row / block.repeat, head * block.repeat + row % block.repeat);
        to[0] = block.largest[row], to[1] = block.total[row];
        std::memcpy(to + 2, block.out + row * block.width, block.width * 4);
      }
    }
  }

  // Whether its queries meet keys as they lie in the cache.
  bool lone(const Task& task) const {
#if AIRDECODE_AMX
    return sizeof(T) == 2 && task.count == 1 && op_.query_heads / op_.kv_heads <= 16 && op_.dim % 32 == 0 &&
           kernels() == Kernels::kAmx;
#endif
    return false;
  }

  void lone_part(const Item& item, int64_t last, int64_t first, bool fetched, const ChunkKeys<T>& source,
                 const ChunkKeys<T>& after) const {
#if AIRDECODE_AMX
    if constexpr (sizeof(T) == 2) {
      const Task& task = tasks_[item.task];
      const int64_t repeat = op_.query_heads / op_.kv_heads, together = 16 / repeat, heads = last - item.head;
      const int64_t groups = ceil_div(heads, together), position = op_.positions[task.token];
      std::optional<TileScope> scope;
      if (!all_lone_) scope.emplace(16);
      LoneRows rows(op_, item.head, heads, source, after);
      LoneRows::Lines later = rows.later();
      bf16* queries = scratch<bf16>(kKeys, heads * op_.dim * 16);
      float* scores = scratch<float>(kScores, groups * kPartKeys * 16);
      auto group = [&](int64_t i) { return LoneHeads{i * together, std::min(together, heads - i * together), repeat}; };
      if (!fetched) {
        rows.start();
        for (int64_t i = 0; i < groups; ++i)
          pack_queries(op_.q + (task.token * op_.query_heads + (item.head + i * together) * repeat) * op_.dim, group(i),
                       op_.dim, queries + i * together * op_.dim * 16);
      }
      for (int64_t i = 0; i < groups; ++i)
        lone_scores(rows, group(i), queries + i * together * op_.dim * 16, later, scores + i * kPartKeys * 16);
      const int64_t high = std::min<int64_t>(op_.kv_len[task.row], position + 1) - first;
      const int64_t low = op_.window ? std::max<int64_t>(position - op_.window + 1 - first, 0) : 0;
      for (int64_t i = 0; i < groups; ++i) {
        float largest[16], total[16];
        lone_weights(rows, scores + i * kPartKeys * 16, op_.scale, low, high, heads * op_.dim / 32 / groups, later,
                     largest, total);
        for (int64_t row = 0; row < group(i).count * repeat; ++row) {
          float* to = part_of(task.first_part + item.chunk, 0, (item.head + i * together) * repeat + row);
          to[0] = largest[row], to[1] = total[row];
          std::fill_n(to + 2, width(), 0.0f);
        }
      }
      for (int64_t j = 0; j < source.depth; j += 32)
        for (int64_t head = 0; head < heads; ++head)
          lone_mix(rows, j, head, repeat, scores + (head / together * kPartKeys + j) * 16 + head % together * repeat,
                   part_of(task.first_part + item.chunk, 0, (item.head + head) * repeat) + 2, width() + 2, later);
    }
#endif
  }

  void whole(const Task& task, int64_t head) const {
    QueryBlock<T> block(op_, task.token, task.count);
    TileScope scope(block.rows);
    T* keys = scratch<T>(kKeys, kChunk / kColumns * group_size(keys, op_.dim));
    T* values = scratch<T>(kValues, width() / kColumns * group_size(values, kChunk));
    block.start(head);
    for (int64_t i = 0; i < task.chunks(); ++i) {
      int64_t first = (task.first_chunk() + i) * kChunk;
      ChunkKeys<T> source(op_, task.row, first, kChunk, task.low, task.high);
      source.pack_keys(head, keys, &source);
      source.pack_values(head, values, &source);
      block.meet(scope, first, op_.kv_len[task.row], source.depth, keys, values);
    }
    for (int64_t row = 0; row < block.rows; ++row) {
      int64_t token = task.token + row / block.repeat, query_head = head * block.repeat + row % block.repeat;
      const float* out = block.out + row * block.width;
      finish(token, query_head, block.largest[row], block.total[row], [&](int64_t i) { return load16(out + i); });
    }
  }

  void merge(const Task& task) const {
    int64_t parts = task.chunks();
    float* shares = scratch<float>(kScores, ceil_div(parts, kLanes) * kLanes);
    for (int64_t token = 0; token < task.count; ++token)
      for (int64_t head = 0; head < op_.query_heads; ++head) {
        const float* first = part_of(task.first_part, token, head);
        float largest = -INFINITY, total = 0;
        for (int64_t i = 0; i < parts; ++i) largest = std::max(largest, shares[i] = first[i * part_size()]);
        float base = largest == -INFINITY ? 0.0f : largest;
        for (int64_t i = 0; i < parts; i += kLanes) store16(shares + i, exp16(load16(shares + i) - base));
        for (int64_t i = 0; i < parts; ++i) total += shares[i] * first[i * part_size() + 1];
        finish(task.token + token, head, largest, total, [&](int64_t dim) {
          f32x16 sum = {};
          for (int64_t i = 0; i < parts; ++i) sum += shares[i] * load16(first + i * part_size() + 2 + dim);
          return sum;
        });
      }
  }

  // out = sums / (total + the sink's share); zero where nothing was seen.
  template <class Sums>
  void finish(int64_t token, int64_t head, float largest, float total, Sums&& sums) const {
    float fade = 1;
    if (op_.sinks) {
      float sink = get(op_.sinks + head), top = std::max(largest, sink);
      fade = std::exp(largest - top);
      total = total * fade + std::exp(sink - top);
    }
    float scale = total != 0 ? fade / total : 0;
    T* to = op_.out + (token * op_.query_heads + head) * op_.dim;
    for (int64_t dim = 0; dim < op_.dim; dim += 16) store(to + dim, sums(dim) * scale, op_.dim - dim);
  }

  const Attention<T>& op_;
  int64_t heads_;  // kv heads of one item of a split row
  std::vector<Task> tasks_;
  std::vector<Item> items_;
  int64_t parts_ = 0;
  bool all_lone_ = true;
  float* partials_ = nullptr;
};

}  // namespace

template <class T>
void Attention<T>::run() const {
  Plan<T>(*this).run();
}

template struct Attention<float>;
template struct Attention<bf16>;

}  // namespace airdecode
