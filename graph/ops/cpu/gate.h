// What a gated feed-forward makes of its two halves.
#pragma once

#include "simd.h"

namespace airdecode {

enum class Activation : int { kSilu, kGeluTanh, kClampedSwiglu };

struct Gate {
  Activation activation;
  float alpha = 1, limit = 0;  // of the clamped one

  f32x16 operator()(f32x16 gate, f32x16 up) const {
    f32x16 steep = gate;
    if (activation == Activation::kGeluTanh) steep = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
    if (activation == Activation::kClampedSwiglu) {
      const f32x16 most = splat(limit);
      gate = gate > most ? most : gate;
      up = up > most ? most : up < -most ? -most : up;
      steep = alpha * gate, up += 1.0f;
    }
    return gate / (1.0f + exp16(-steep)) * up;
  }
};

}  // namespace airdecode
