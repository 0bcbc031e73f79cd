// Weights in panels of 32 outputs, so that a product reads them from end to end.

#pragma once

#include <cstdint>
#include <cstring>

#include "structs.h"

namespace {

int64_t packed_index(int64_t in, int64_t o, int64_t i, int64_t unit) {
    return ((o / kPanel * (in / unit) + i / unit) * kPanel + o % kPanel) * unit + i % unit;
}

// Puts 32 outputs side by side, `unit` neighbouring inputs of each together: [out, in] becomes
// [out / 32, in / unit, 32, unit].
template <class T>
void pack(const T* from, int64_t out, int64_t in, int64_t unit, T* to) {
    for (int64_t o = 0; o < out; o++)
        for (int64_t i = 0; i < in; i++) to[packed_index(in, o, i, unit)] = from[o * in + i];
}

float widen(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// One weight, out of its panel.
float weight(const Linear& linear, int64_t o, int64_t i) {
    const int64_t in = linear.in;
    if (linear.kind == kFloat32) return static_cast<const float*>(linear.weights)[packed_index(in, o, i, 1)];
    if (linear.kind == kBfloat16) return widen(static_cast<const uint16_t*>(linear.weights)[packed_index(in, o, i, 2)]);
    const int32_t byte = static_cast<const uint8_t*>(linear.weights)[packed_index(in, o, i, 4)];
    return (byte - 128) * widen(linear.scales[packed_index(in / kGroup, o, i / kGroup, 1)]);
}

}  // namespace
