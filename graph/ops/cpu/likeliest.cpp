// Which tokens top-k and top-p keep, without sorting the vocabulary. Tokens are dealt into bins of falling score, so
// that only the bin where a limit falls is put in order.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels.h"
#include "pool.h"

namespace airdecode {
namespace {

constexpr int kBins = 4096;
constexpr float kSpan = 64.0f;  // scores further than this below the best share the last bin

struct Bin {
  double mass = 0;
  int64_t count = 0;
};

// The last token that is kept, in rank order; id -1: the last of its bin.
struct Last {
  int bin;
  int64_t id;
};

// One row, dealt into bins.
class Row {
 public:
  Row(const float* scores, const float* weights, int64_t width)
      : scores_(scores), weights_(weights), width_(width), bins_(scratch<Bin>(kBinsOfRow, kBins)) {
    places_ = scratch<uint16_t>(kPlaces, width);
    order_ = scratch<uint64_t>(kOrder, width);
    std::fill(bins_, bins_ + kBins, Bin());
    auto [best, least] = range();
    // Subtracting and scaling keep the order, so a better token never lies in a later bin.
    float span = std::min(best - least, kSpan), scale = span > 0 ? (kBins - 1) / span : 0;
    for (int64_t i = 0; i < width; ++i) {
      float below = best - scores[i];
      int bin = below <= span ? int(below * scale) : kBins - 1;
      places_[i] = uint16_t(bin);
      bins_[bin].mass += weights[i];
      bins_[bin].count += 1;
    }
  }

  // Keeps every token; `mass` becomes theirs.
  Last everything(double& mass) const {
    Last last{0, -1};
    for (int bin = 0; bin < kBins; ++bin) {
      mass += bins_[bin].mass;
      if (bins_[bin].count > 0) last.bin = bin;
    }
    return last;
  }

  // Keeps the first `size` tokens, fewer than there are; `mass` becomes theirs.
  Last by_count(int64_t size, double& mass) {
    int bin = 0;
    for (; bins_[bin].count < size; ++bin) size -= bins_[bin].count, mass += bins_[bin].mass;
    const uint64_t* order = ranked(bin);
    for (int64_t i = 0; i < size; ++i) mass += weights_[id(order[i])];
    return {bin, id(order[size - 1])};
  }

  // Keeps the first tokens whose weights reach `target`, at most up to `limit`.
  Last by_mass(double target, Last limit) {
    int bin = 0;
    for (; bin < limit.bin && bins_[bin].mass < target; ++bin) target -= bins_[bin].mass;
    const uint64_t* order = ranked(bin);
    int64_t at = 0, end = bins_[bin].count - 1;
    for (; at < end && !(bin == limit.bin && id(order[at]) == limit.id); ++at) {
      target -= weights_[id(order[at])];
      if (target <= 0) break;
    }
    return {bin, id(order[at])};
  }

  // The weights of everything up to `last`; the rest is 0.
  void keep(Last last, float* out) const {
    float score = scores_[last.id];
    for (int64_t i = 0; i <= last.id; ++i) out[i] = scores_[i] >= score ? weights_[i] : 0;
    for (int64_t i = last.id + 1; i < width_; ++i) out[i] = scores_[i] > score ? weights_[i] : 0;
  }

 private:
  // The largest score, and the smallest that is no -inf.
  std::pair<float, float> range() const {
    const f32x16 infinite = splat(INFINITY);
    f32x16 best = -infinite, least = infinite;
    int64_t i = 0;
    for (; i + 16 <= width_; i += 16) {
      f32x16 score = load16(scores_ + i);
      best = max16(score, best);
      least = (score < least) & (score > -infinite) ? score : least;
    }
    float most = largest16(best), fewest = -largest16(-least);
    for (; i < width_; ++i) {
      most = std::max(most, scores_[i]);
      if (scores_[i] > -INFINITY) fewest = std::min(fewest, scores_[i]);
    }
    return {most, fewest};
  }

  static int64_t id(uint64_t ranked) { return int64_t(ranked & 0xffffffff); }

  // The tokens of one bin, best first, equals by rising id: rank above, id below.
  const uint64_t* ranked(int bin) {
    int64_t count = 0;
    for (int64_t i = 0; i < width_; ++i)
      if (places_[i] == bin) {
        uint32_t bits = scores_[i] == 0 ? 0 : bits_as<uint32_t>(scores_[i]);
        uint32_t rising = bits & 0x80000000 ? ~bits : bits | 0x80000000;
        order_[count++] = uint64_t(~rising) << 32 | uint64_t(i);
      }
    std::sort(order_, order_ + count);
    return order_;
  }

  const float *scores_, *weights_;
  int64_t width_;
  Bin* bins_;
  uint16_t* places_;
  uint64_t* order_;
};

}  // namespace

void likeliest(const float* scores, const float* weights, const int32_t* top_k, const float* top_p, int64_t rows,
               int64_t width, float* out) {
  parallel(rows, double(rows * width) * 3, [&](Units& units, int thread) {
    for (int64_t row; (row = units.take(thread)) >= 0;) {
      const float *from = weights + row * width, *score = scores + row * width;
      float* to = out + row * width;
      bool all = top_k[row] < 1 || top_k[row] >= width;
      if (all && top_p[row] >= 1) {
        std::copy(from, from + width, to);
        continue;
      }
      Row ranked(score, from, width);
      double mass = 0;
      Last last = all ? ranked.everything(mass) : ranked.by_count(top_k[row], mass);
      if (top_p[row] < 1) last = ranked.by_mass(top_p[row] * mass, last);
      ranked.keep(last, to);
    }
  });
}

}  // namespace airdecode
