// Sixteen floats at a time, in GCC's vector types: any processor can run them.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;  // floats in a vector

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

Floats load(const float* from) {
    Floats v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

Floats load(const uint16_t* from) {  // bfloat16 is the upper half of a float32
    Halves h;
    std::memcpy(&h, from, sizeof h);
    return (Floats)(__builtin_convertvector(h, Words) << 16);
}

void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

void store(uint16_t* to, Floats v) {  // to the nearest, ties to even
    Words w = (Words)v;
    w = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
    Halves h = __builtin_convertvector(w, Halves);
    std::memcpy(to, &h, sizeof h);
}

float sum(Floats v) {
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

Floats all(float value) { return Floats{} + value; }

Floats larger(Floats a, Floats b) { return a > b ? a : b; }

constexpr float kRounder = 12582912.0f;  // 1.5 * 2**23: adding it and taking it away rounds to an integer

// e**x within two units in the last place: 2**n times a polynomial on [-ln 2 / 2, ln 2 / 2].
Floats exponential(Floats x) {
    x = larger(x, all(-87.0f));
    x = x < 88.0f ? x : all(88.0f);
    Floats n = (x * 1.44269504f + kRounder) - kRounder;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (Floats)((Ints)p + (__builtin_convertvector(n, Ints) << 23));
}

Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

}  // namespace
