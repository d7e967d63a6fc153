// Expert layers: tokens are gathered by expert, each chosen expert multiplies its rows at once, and the mix is summed
// in float32 in the order of the experts' ids. Three loops over the pool, whatever the number of experts.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "formats.h"
#include "kernels.h"
#include "pool.h"

namespace airdecode {
namespace {

struct Visit {  // of one token to one expert
  int32_t token;
  float share;
};
struct Batch {  // the visits of one expert
  int64_t expert, first, count;
  int64_t left, hidden, sums;  // where its parts of the buffers begin
};

template <class T, class Weight>
class Visits {
 public:
  using Left = typename Weight::Left;

  explicit Visits(const Experts<T, Weight>& op) : op_(op), begin_(op.num_experts + op.identity + 1) {
    for_each([&](int64_t, int64_t k) { ++begin_[op.ids[k] + 1]; });
    for (size_t i = 1; i < begin_.size(); ++i) begin_[i] += begin_[i - 1];
    visits_.resize(begin_.back());
    std::vector<int64_t> next(begin_);
    for_each([&](int64_t token, int64_t k) { visits_[next[op.ids[k]]++] = {int32_t(token), op.weights[k]}; });
    for (int64_t expert = 0; expert < op.num_experts; ++expert) add(expert);
    left_ = scratch<Left>(kLhs, left_size_);
    hidden_ = scratch<Left>(kHidden, hidden_size_);
    prepared_ = scratch<float>(kTileSums, sums_size_);
    results_ = scratch<float>(kPartials, begin_[op.num_experts] * op.hidden);
  }

  void run() {
    double worth = double(batches_.size()) * double(op_.gate_up.bytes() + op_.down.bytes()) / 24;
    std::vector<Weight> gate_up, down;
    for (const Batch& batch : batches_) {
      for (int64_t i = 0; i < batch.count; ++i)
        pack_left(op_.x + visits_[batch.first + i].token * op_.stride, 0, op_.hidden, i, i + 1, left_ + batch.left);
      gate_up.push_back(op_.gate_up.at(batch.expert));
      gate_up.back().prepare(left_ + batch.left, batch.count, prepared_ + batch.sums);
      down.push_back(op_.down.at(batch.expert));
    }
    each_group(ceil_div(op_.width, kColumns), 2, worth,
               [&](int64_t i, int64_t group, int64_t row, int64_t rows, TileScope& scope, float* sums) {
                 const int64_t size = rows_of(rows) * kColumns;
                 const Groups both{group, 2, ceil_div(op_.width, kColumns)};
                 gate_up[i].sums(scope, left_ + batches_[i].left, row, rows, both, sums, size);
                 store_hidden(batches_[i], group, row, rows, sums, sums + size);
               });
    for (size_t i = 0; i < batches_.size(); ++i)
      down[i].prepare(hidden_ + batches_[i].hidden, batches_[i].count, prepared_ + batches_[i].sums);
    each_group(ceil_div(op_.hidden, kColumns), 1, worth,
               [&](int64_t i, int64_t group, int64_t row, int64_t rows, TileScope& scope, float* sums) {
                 down[i].sums(scope, hidden_ + batches_[i].hidden, row, rows, {group}, sums, 0);
                 store_results(batches_[i], group, row, rows, sums);
               });
    mix();
  }

 private:
  static int64_t rows_of(int64_t rows) { return ceil_div(rows, 16) * 16; }

  template <class Body>
  void for_each(Body&& body) const {
    for (int64_t token = 0; token < op_.tokens; ++token)
      for (int64_t k = token * op_.top; op_.live[token] && k < (token + 1) * op_.top; ++k) {
        if (op_.ids[k] < 0 || op_.ids[k] >= op_.num_experts + op_.identity)
          throw std::runtime_error("experts: there is no expert " + std::to_string(op_.ids[k]));
        body(token, k);
      }
  }

  void add(int64_t expert) {
    int64_t count = begin_[expert + 1] - begin_[expert];
    if (!count) return;
    batches_.push_back({expert, begin_[expert], count, left_size_, hidden_size_, sums_size_});
    left_size_ += left_size(static_cast<Left*>(nullptr), count, op_.hidden);
    hidden_size_ += left_size(static_cast<Left*>(nullptr), count, op_.width);
    sums_size_ += std::max(op_.gate_up.prepared_size(count), op_.down.prepared_size(count));
  }

  // body(batch, column group, first row, rows, scope, sums) for every part of one product of every batch.
  template <class Body>
  void each_group(int64_t groups, int64_t stacked, double worth, Body&& body) {
    parallel(int64_t(batches_.size()) * groups, worth, [&](Units& units, int thread) {
      for (int64_t unit; (unit = units.take(thread)) >= 0;) {
        int64_t i = unit / groups, count = batches_[i].count;
        float* sums = scratch<float>(kSums, stacked * rows_of(std::min(count, Weight::kPassRows)) * kColumns);
        TileScope scope(count, Weight::in_bytes(count));
        for (int64_t row = 0; row < count; row += Weight::kPassRows)
          body(i, unit % groups, row, std::min(Weight::kPassRows, count - row), scope, sums);
      }
    });
  }

  void store_hidden(const Batch& batch, int64_t group, int64_t row, int64_t rows, const float* gates,
                    const float* ups) {
    const T* bias = op_.gate_up_bias ? op_.gate_up_bias + batch.expert * 2 * op_.width : nullptr;
    for (int64_t column = group * kColumns; column < group * kColumns + kColumns; column += 16) {
      int64_t count = std::clamp<int64_t>(op_.width - column, 0, 16), at = column % kColumns;
      for (int64_t i = 0; i < rows; ++i) {
        f32x16 gate = load16(gates + i * kColumns + at), up = load16(ups + i * kColumns + at);
        if (bias) gate += load(bias + column, count), up += load(bias + op_.width + column, count);
        Left* to = left_at(hidden_ + batch.hidden, op_.width, row + i, group) + at;
        store(to, op_.gate(gate, up),
              sizeof(Left) == 2 ? 16 : count);  // beyond the width weights are 0, and so is this
      }
    }
  }

  void store_results(const Batch& batch, int64_t group, int64_t row, int64_t rows, const float* sums) {
    const T* bias = op_.down_bias ? op_.down_bias + batch.expert * op_.hidden : nullptr;
    for (int64_t column = group * kColumns; column < std::min(op_.hidden, group * kColumns + kColumns); column += 16) {
      int64_t count = op_.hidden - column;
      for (int64_t i = 0; i < rows; ++i) {
        f32x16 sum = load16(sums + i * kColumns + column % kColumns);
        if (bias) sum += load(bias + column, count);
        store(results_ + (batch.first + row + i) * op_.hidden + column, sum, count);
      }
    }
  }

  void mix() {
    std::vector<int32_t> order(visits_.size()), begin(op_.tokens + 1);  // each token's visits, by expert
    for (const Visit& visit : visits_) ++begin[visit.token + 1];
    for (int64_t i = 0; i < op_.tokens; ++i) begin[i + 1] += begin[i];
    std::vector<int32_t> next(begin);
    for (size_t i = 0; i < visits_.size(); ++i) order[next[visits_[i].token]++] = int32_t(i);
    parallel(op_.tokens, double(visits_.size()) * double(op_.hidden) / 8, [&](Units& units, int thread) {
      for (int64_t token; (token = units.take(thread)) >= 0;)
        for (int64_t column = 0; column < op_.hidden; column += 16) {
          int64_t count = op_.hidden - column;
          f32x16 sum = {};
          for (int32_t i = begin[token]; i < begin[token + 1]; ++i) {
            bool itself = order[i] >= begin_[op_.num_experts];
            sum += visits_[order[i]].share * (itself ? load(op_.x + token * op_.stride + column, count)
                                                     : load(results_ + order[i] * op_.hidden + column, count));
          }
          if (op_.shared) sum = rounded<T>(sum) + load(op_.shared + token * op_.hidden + column, count);
          store(op_.out + token * op_.hidden + column, sum, count);
        }
    });
  }

  const Experts<T, Weight>& op_;
  std::vector<int64_t> begin_;  // of each expert's visits
  std::vector<Visit> visits_;   // by expert, then by token
  std::vector<Batch> batches_;  // of experts that have any
  int64_t left_size_ = 0, hidden_size_ = 0, sums_size_ = 0;
  Left *left_, *hidden_;
  float *prepared_, *results_;
};

}  // namespace

template <class T, class Weight>
void Experts<T, Weight>::run() const {
  Visits<T, Weight>(*this).run();
}

template struct Experts<float, Plain<float>>;
template struct Experts<float, Int8>;
template struct Experts<float, Int4>;
template struct Experts<bf16, Plain<bf16>>;
template struct Experts<bf16, Int8>;
template struct Experts<bf16, Int4>;

}  // namespace airdecode
