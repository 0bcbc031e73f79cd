// Products of activations and packed weights, with the norm before them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "structs.h"
#include "threads.h"
#include "vectors.h"

namespace {

// Memory that grows and is kept, so that a step of a size seen before allocates nothing.
template <class T>
class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    T* room(int64_t count) {
        if (count > capacity_) {
            std::free(data_);
            capacity_ = std::max(count, 2 * capacity_);
            data_ = static_cast<T*>(std::aligned_alloc(64, (capacity_ * sizeof(T) + 63) / 64 * 64));
        }
        return data_;
    }

  private:
    T* data_ = nullptr;
    int64_t capacity_ = 0;
};

// Activations as the weights of a layer want to meet them.
struct Operand {
    const float* floats = nullptr;     // [rows, in]
    const uint16_t* halves = nullptr;  // bfloat16 [rows, in]
    const int8_t* bytes = nullptr;     // [rows, in], in groups of 32
    const float* scales = nullptr;     // [rows, in / 32]
    const int32_t* offsets = nullptr;  // [rows, in / 32], what the unsigned weights add too much
};

struct Workspace {
    Buffer<float> qkv, context, inner, floats, scales;
    Buffer<uint16_t> halves;
    Buffer<int8_t> bytes;
    Buffer<int32_t> offsets;
};

thread_local Workspace work;  // of the thread that calls

// x scaled to a root mean square of 1, times the weight: "Root Mean Square Layer Normalization", Zhang & Sennrich 2019.
void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
    Floats squares{};
    for (int64_t i = 0; i < size; i += kLanes) squares += load(x + i) * load(x + i);
    float scale = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
}

void quantize_row(const float* x, int64_t size, int8_t* bytes, float* scales, int32_t* offsets) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
    for (int64_t group = 0; group < size / kGroup; group++, x += kGroup, bytes += kGroup) {
        const Floats halves[2] = {load(x), load(x + kLanes)};
        const Floats largest = larger(larger(halves[0], -halves[0]), larger(halves[1], -halves[1]));
        float top = 0;
        for (int i = 0; i < kLanes; i++) top = std::max(top, largest[i]);
        const float inverse = top > 0 ? 127.0f / top : 0.0f;
        Ints total{};
        for (int half = 0; half < 2; half++) {
            const Ints rounded = __builtin_convertvector((halves[half] * inverse + kRounder) - kRounder, Ints);
            const Bytes narrow = __builtin_convertvector(rounded, Bytes);
            std::memcpy(bytes + half * kLanes, &narrow, sizeof narrow);
            total += rounded;
        }
        scales[group] = top / 127.0f;
        offsets[group] = 0;
        for (int i = 0; i < kLanes; i++) offsets[group] -= 128 * total[i];
    }
}

// The parts of each row side by side, normed where there is a norm, in the form for `linear`.
Operand prepare(const Linear& linear, const Part* parts, int64_t count, float eps, int64_t rows, int64_t threads) {
    const int64_t in = linear.in, groups = in / kGroup;
    Operand operand;
    if (linear.kind == kFloat32 && count == 1 && !parts->norm && parts->stride == in) {
        operand.floats = parts->x;
        return operand;
    }
    const bool has_norm = std::any_of(parts, parts + count, [](const Part& part) { return part.norm; });
    float* floats = has_norm || linear.kind == kFloat32 ? work.floats.room(rows * in) : nullptr;
    uint16_t* halves = linear.kind == kBfloat16 ? work.halves.room(rows * in) : nullptr;
    int8_t* bytes = linear.kind == kInt8 ? work.bytes.room(rows * in) : nullptr;
    float* scales = bytes ? work.scales.room(rows * groups) : nullptr;
    int32_t* offsets = bytes ? work.offsets.room(rows * groups) : nullptr;
    parallel(rows, threads, 8, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int64_t at = r * in;
            for (const Part* part = parts; part < parts + count; at += part->width, part++) {
                const float* x = part->x + r * part->stride;
                if (part->norm) {
                    rms_norm(x, part->norm, part->width, eps, floats + at);
                    x = floats + at;
                }
                if (linear.kind == kFloat32 && !part->norm) std::copy(x, x + part->width, floats + at);
                if (halves)
                    for (int64_t i = 0; i < part->width; i += kLanes) store(halves + at + i, load(x + i));
                const int64_t group = at / kGroup;
                if (bytes) quantize_row(x, part->width, bytes + at, scales + group, offsets + group);
            }
        }
    });
    operand = {floats, halves, bytes, scales, offsets};
    return operand;
}

// Rows of x as they are, or normed.
Operand prepare(const Linear& linear, const float* norm, float eps, const float* x, int64_t rows, int64_t threads) {
    const Part part{x, linear.in, linear.in, norm};
    return prepare(linear, &part, 1, eps, rows, threads);
}

// Products: R rows times a panel

template <int R>
struct Tile {
    Floats y[R][2] = {};
};

#ifdef __AVX512F__
constexpr int kRows = 12;  // as many tiles as the registers hold
#else
constexpr int kRows = 4;
#endif

template <int R>
Tile<R> multiply_float32(const Linear& linear, const Operand& x, int64_t row, int64_t panel) {
    Tile<R> tile;
    const int64_t in = linear.in;
    const float* w = static_cast<const float*>(linear.weights) + panel * in * kPanel;
    const float* a = x.floats + row * in;
    for (int64_t k = 0; k < in; k++, w += kPanel) {
        Floats w0 = load(w), w1 = load(w + kLanes);
        for (int r = 0; r < R; r++) {
            tile.y[r][0] += w0 * a[r * in + k];
            tile.y[r][1] += w1 * a[r * in + k];
        }
    }
    return tile;
}

template <int R>
Tile<R> multiply_bfloat16(const Linear& linear, const Operand& x, int64_t row, int64_t panel) {
    Tile<R> tile;
    const int64_t pairs = linear.in / 2;
    const uint32_t* w = static_cast<const uint32_t*>(linear.weights) + panel * pairs * kPanel;
    const uint32_t* a = reinterpret_cast<const uint32_t*>(x.halves) + row * pairs;
    for (int64_t k = 0; k < pairs; k++, w += kPanel) {
#ifdef __AVX512BF16__
        __m512bh v0 = (__m512bh)_mm512_loadu_si512(w), v1 = (__m512bh)_mm512_loadu_si512(w + kLanes);
        for (int r = 0; r < R; r++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r * pairs + k]));
            tile.y[r][0] = (Floats)_mm512_dpbf16_ps((__m512)tile.y[r][0], pair, v0);
            tile.y[r][1] = (Floats)_mm512_dpbf16_ps((__m512)tile.y[r][1], pair, v1);
        }
#else
        Words v0, v1;
        std::memcpy(&v0, w, sizeof v0);
        std::memcpy(&v1, w + kLanes, sizeof v1);
        for (int r = 0; r < R; r++) {
            Words pair = Words{} + a[r * pairs + k];
            Floats even = (Floats)(pair << 16), odd = (Floats)(pair & 0xffff0000u);
            tile.y[r][0] += (Floats)(v0 << 16) * even + (Floats)(v0 & 0xffff0000u) * odd;
            tile.y[r][1] += (Floats)(v1 << 16) * even + (Floats)(v1 & 0xffff0000u) * odd;
        }
#endif
    }
    return tile;
}

// Adds 16 dot products of four unsigned and four signed bytes each; `a` holds the four signed ones.
Ints dot_bytes(Ints sums, Words w, int32_t a) {
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(a));
#else
    for (int byte = 0; byte < 4; byte++)
        sums += (Ints)((w >> (8 * byte)) & 0xff) * static_cast<int32_t>(static_cast<int8_t>(a >> (8 * byte)));
    return sums;
#endif
}

template <int R>
Tile<R> multiply_int8(const Linear& linear, const Operand& x, int64_t row, int64_t panel) {
    Tile<R> tile;
    constexpr int kFours = kGroup / 4;
    const int64_t groups = linear.in / kGroup;
    const uint32_t* w = static_cast<const uint32_t*>(linear.weights) + panel * groups * kFours * kPanel;
    const uint16_t* scales = linear.scales + panel * groups * kPanel;
    for (int64_t group = 0; group < groups; group++, scales += kPanel) {
        Ints sums[R][2];
        for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = Ints{} + x.offsets[(row + r) * groups + group];
        for (int four = 0; four < kFours; four++, w += kPanel) {
            Words weights[2];
            std::memcpy(weights, w, sizeof weights);
            for (int r = 0; r < R; r++) {
                int32_t a;
                std::memcpy(&a, x.bytes + (row + r) * linear.in + group * kGroup + four * 4, sizeof a);
                sums[r][0] = dot_bytes(sums[r][0], weights[0], a);
                sums[r][1] = dot_bytes(sums[r][1], weights[1], a);
            }
        }
        const Floats scale[2] = {load(scales), load(scales + kLanes)};
        for (int r = 0; r < R; r++)
            for (int p = 0; p < 2; p++) {
                const Floats both = scale[p] * x.scales[(row + r) * groups + group];
                tile.y[r][p] += __builtin_convertvector(sums[r][p], Floats) * both;
            }
    }
    return tile;
}

template <int R>
Tile<R> multiply(const Linear& linear, const Operand& x, int64_t row, int64_t panel) {
    Tile<R> tile = linear.kind == kFloat32    ? multiply_float32<R>(linear, x, row, panel)
                   : linear.kind == kBfloat16 ? multiply_bfloat16<R>(linear, x, row, panel)
                                              : multiply_int8<R>(linear, x, row, panel);
    if (linear.bias)
        for (int p = 0; p < 2; p++)
            for (int r = 0; r < R; r++) tile.y[r][p] += load(linear.bias + panel * kPanel + p * kLanes);
    return tile;
}

// What becomes of a tile: calls finish(row, panel, y0, y1) for each of `count` rows.
template <int R, class Finish>
void run_tile(const Linear& linear, const Operand& x, int64_t row, int count, int64_t panel, const Finish& finish) {
    if constexpr (R > 1) {
        if (count < R) return run_tile<R - 1>(linear, x, row, count, panel, finish);
    }
    const Tile<R> tile = multiply<R>(linear, x, row, panel);
    for (int r = 0; r < R; r++) finish(row + r, panel, tile.y[r][0], tile.y[r][1]);
}

template <class Finish>
void product(const Linear& linear, const Operand& x, int64_t rows, int64_t threads, const Finish& finish) {
    const int64_t blocks = (rows + kRows - 1) / kRows;
    parallel(linear.out / kPanel, threads, 2, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; panel++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t row = rows * block / blocks, last = rows * (block + 1) / blocks;
                run_tile<kRows>(linear, x, row, static_cast<int>(last - row), panel, finish);
            }
    });
}

// y = x @ weights.T + bias: [rows, width], the first `width` outputs.
void run_linear(const Linear& linear, const Operand& x, int64_t rows, int64_t width, int64_t threads, float* y) {
    product(linear, x, rows, threads, [=](int64_t row, int64_t panel, Floats y0, Floats y1) {
        for (int p = 0; p < 2; p++) {
            const int64_t first = panel * kPanel + p * kLanes, lanes = std::min<int64_t>(kLanes, width - first);
            if (lanes > 0) std::memcpy(y + row * width + first, p ? &y1 : &y0, lanes * sizeof(float));
        }
    });
}

}  // namespace
