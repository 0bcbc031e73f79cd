// Attention straight from the pages, and the way of K and V into them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "linear.h"
#include "structs.h"
#include "threads.h"
#include "vectors.h"

namespace {

// Where lane `i` of two vectors, one behind the other, comes from when blocks of `half` lanes are folded into one.
constexpr int fold_from(int half, int i) { return (i / half % 2 ? kLanes : 0) + i / (2 * half) * 2 * half + i % half; }

template <int kHalf, int... kLane>
Floats fold(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, fold_from(kHalf, kLane)...) +
           __builtin_shufflevector(a, b, fold_from(kHalf, kLane) + kHalf...);
#else
    return __builtin_shuffle(a, b, Ints{fold_from(kHalf, kLane)...}) +
           __builtin_shuffle(a, b, Ints{fold_from(kHalf, kLane) + kHalf...});
#endif
}

template <int kHalf>
Floats fold(Floats a, Floats b) {
    return fold<kHalf>(a, b, std::make_integer_sequence<int, kLanes>());
}

// The 16 sums of 16 vectors.
Floats sums(const Floats v[kLanes]) {
    Floats a[8], b[4];
    for (int i = 0; i < 8; i++) a[i] = fold<8>(v[i], v[i + 8]);
    for (int i = 0; i < 4; i++) b[i] = fold<4>(a[i], a[i + 4]);
    return fold<1>(fold<2>(b[0], b[2]), fold<2>(b[1], b[3]));
}

template <class T>
class Cache {
  public:
    Cache(const Shape& shape, void* kv)
        : size_(shape.page_size), stride_(shape.kv_heads * shape.head_dim), kv_(static_cast<T*>(kv)) {}
    T* k(int64_t page, int64_t offset) const { return kv_ + (page * 2 * size_ + offset) * stride_; }
    T* v(int64_t page, int64_t offset) const { return k(page, offset) + size_ * stride_; }

  private:
    int64_t size_, stride_;
    T* kv_;
};

// K of the slots that a token sees; V lies `to_v` values behind. Filled up to whole tiles of 16 with the last.
template <class T>
struct Seen {
    std::vector<const T*> k;
    int64_t count, to_v;

    void find(const Shape& shape, const Step& step, int64_t token, const Cache<T>& cache) {
        const int32_t* pages = step.pages + step.first_pages[token];
        const int64_t size = shape.page_size, own = step.seen[token], stride = shape.kv_heads * shape.head_dim;
        to_v = size * stride;
        k.clear();
        for (int64_t page = 0; page * size < own; page++) {
            const T* at = cache.k(pages[page], 0);
            for (int64_t i = std::min(size, own - page * size); i > 0; i--, at += stride) k.push_back(at);
        }
        for (int64_t i = step.ancestor_bounds[token]; i < step.ancestor_bounds[token + 1]; i++)
            k.push_back(cache.k(pages[step.ancestors[i] / size], step.ancestors[i] % size));
        count = k.size();
        while (k.size() % kLanes) k.push_back(k.back());
    }
};

// 16 rows of K or V, in float32.
template <int D>
struct Rows {
    Floats wide[kLanes][D / kLanes];
    template <class T>
    void read(const T* const* rows, int64_t at) {
        for (int i = 0; i < kLanes; i++)
            for (int d = 0; d < D / kLanes; d++) wide[i][d] = load(rows[i] + at + d * kLanes);
    }
};

// e**(x - max x), with zeros behind `count`; returns the sum.
float softmax_weights(float* x, int64_t count) {
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    std::fill(x + count, x + padded, -std::numeric_limits<float>::infinity());
    Floats highest = load(x), total{};
    for (int64_t i = kLanes; i < padded; i += kLanes) highest = larger(highest, load(x + i));
    float top = highest[0];
    for (int i = 1; i < kLanes; i++) top = std::max(top, highest[i]);
    for (int64_t i = 0; i < padded; i += kLanes) {
        const Floats weights = exponential(load(x + i) - top);
        store(x + i, weights);
        if (i + kLanes <= count) total += weights;
    }
    float mass = sum(total);
    for (int64_t i = count / kLanes * kLanes; i < count; i++) mass += x[i];
    std::fill(x + count, x + padded, 0.0f);  // e**-87, the least there is, is not quite nothing
    return mass;
}

// One token's query heads that share a head of K and V; scores: [heads, slots seen].
template <class T, int D>
void attend(const Shape& shape, const Seen<T>& seen, int64_t kv_head, const float* q, float* out,
            std::vector<float>& scores) {
    constexpr int kParts = D / kLanes;
    const int64_t padded = seen.k.size(), group = shape.heads / shape.kv_heads, at = kv_head * D;
    const float scale = 1.0f / std::sqrt(static_cast<float>(D));
    scores.resize(group * padded);
    Rows<D> rows;
    for (int64_t first = 0; first < padded; first += kLanes) {
        rows.read(&seen.k[first], at);
        for (int64_t g = 0; g < group; g++) {
            Floats query[kParts], products[kLanes];
            for (int d = 0; d < kParts; d++) query[d] = load(q + g * D + d * kLanes) * scale;
            for (int i = 0; i < kLanes; i++) {
                products[i] = query[0] * rows.wide[i][0];
                for (int d = 1; d < kParts; d++) products[i] += query[d] * rows.wide[i][d];
            }
            store(&scores[g * padded + first], sums(products));
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float* own = &scores[g * padded];
        const float inverse = 1.0f / softmax_weights(own, seen.count);
        for (int64_t i = 0; i < padded; i += kLanes) store(own + i, load(own + i) * inverse);
    }
    std::fill(out, out + group * D, 0.0f);
    for (int64_t first = 0; first < padded; first += kLanes) {
        rows.read(&seen.k[first], at + seen.to_v);
        for (int64_t g = 0; g < group; g++) {
            const float* weights = &scores[g * padded + first];
            Floats mixed[kParts];
            for (int d = 0; d < kParts; d++) mixed[d] = load(out + g * D + d * kLanes);
            for (int i = 0; i < kLanes; i++)
                for (int d = 0; d < kParts; d++) mixed[d] += weights[i] * rows.wide[i][d];
            for (int d = 0; d < kParts; d++) store(out + g * D + d * kLanes, mixed[d]);
        }
    }
}

template <class T>
void attend_heads(const Shape& shape, const Seen<T>& seen, int64_t kv_head, const float* q, float* out,
                  std::vector<float>& scores) {
    switch (shape.head_dim) {
        case 16: return attend<T, 16>(shape, seen, kv_head, q, out, scores);
        case 32: return attend<T, 32>(shape, seen, kv_head, q, out, scores);
        case 64: return attend<T, 64>(shape, seen, kv_head, q, out, scores);
        case 80: return attend<T, 80>(shape, seen, kv_head, q, out, scores);
        case 96: return attend<T, 96>(shape, seen, kv_head, q, out, scores);
        case 128: return attend<T, 128>(shape, seen, kv_head, q, out, scores);
        case 256: return attend<T, 256>(shape, seen, kv_head, q, out, scores);
    }
}

template <class T>
void attention(const Shape& shape, const Step& step, const float* q, int64_t q_stride, void* kv, float* out) {
    const Cache<T> cache(shape, kv);
    const int64_t group = shape.heads / shape.kv_heads;
    parallel(step.tokens * shape.kv_heads, step.threads, 2, [&](int64_t begin, int64_t end) {
        static thread_local Seen<T> seen;
        static thread_local std::vector<float> scores;
        int64_t known = -1;
        for (int64_t task = begin; task < end; task++) {
            const int64_t token = task / shape.kv_heads, kv_head = task % shape.kv_heads;
            if (token != known) seen.find(shape, step, known = token, cache);
            const int64_t first = kv_head * group * shape.head_dim;
            float* to = out + token * shape.heads * shape.head_dim + first;
            attend_heads<T>(shape, seen, kv_head, q + token * q_stride + first, to, scores);
        }
    });
}

// Rotary positions in Hugging Face's halves: Su et al., arXiv 2104.09864.
void rotate(float* x, const float* cosines, const float* sines, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        const float left = x[i], right = x[i + half];
        x[i] = left * cosines[i] - right * sines[i];
        x[i + half] = right * cosines[i + half] + left * sines[i + half];
    }
}

// Rotates q and k in place, and puts k and v into the cache.
template <class T>
void place(const Shape& shape, const Layer& layer, const Step& step, float* qkv, void* kv) {
    const Cache<T> cache(shape, kv);
    const int64_t size = shape.head_dim, rotated = shape.heads + shape.kv_heads;
    const int64_t width = (rotated + shape.kv_heads) * size, stored = shape.kv_heads * size;
    parallel(step.tokens, step.threads, 8, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            float* row = qkv + token * width;
            const int64_t angles = step.positions[token] * size;
            for (int64_t head = 0; head < rotated; head++) {
                float* x = row + head * size;
                const float* norm = head < shape.heads ? layer.q_norm : layer.k_norm;
                if (norm) rms_norm(x, norm, size, shape.eps, x);
                rotate(x, step.cosines + angles, step.sines + angles, size);
            }
            const float *k = row + shape.heads * size, *v = k + stored;
            const int64_t page = step.slots[token] / shape.page_size, offset = step.slots[token] % shape.page_size;
            T *k_to = cache.k(page, offset), *v_to = cache.v(page, offset);
            for (int64_t i = 0; i < stored; i += kLanes) {
                store(k_to + i, load(k + i));
                store(v_to + i, load(v + i));
            }
        }
    });
}

}  // namespace
