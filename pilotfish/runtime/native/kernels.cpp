// A Llama-family decoder layer on a CPU, fused.
//
// Everything between the weights and the cache is float32. Weights are float32, bfloat16, or int8 in groups of
// 32 with a scale each; the cache is float32 or bfloat16. No sum depends on what else is in the
// batch: every output is added up in one order, so a row's numbers are the same alone and in any company.
//
// Written with GCC's vector types, which any processor can run; what AVX-512 has for bfloat16 and int8 is used
// where there is. Called through ctypes: plain structs, no exceptions, no torch headers.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;  // floats in a vector
constexpr int kPanel = 32;  // outputs side by side in packed weights: two vectors
constexpr int kGroup = 32;  // int8 weights that share a scale

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

enum Kind : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

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

}  // namespace

extern "C" {

// Weights [out, in] in panels of 32 outputs, see `pilotfish_pack`: a product reads them from end to end, once. In a
// gated layer a panel is 16 gates and their 16 partners.
struct Linear {
    int64_t kind, out, in;
    const void* weights;
    const uint16_t* scales;  // bfloat16 [out / 32, in / 32, 32]; int8 only
    const float* bias;       // [out], in the order of the panels, or null
};

struct Layer {
    const float* attention_norm;  // [hidden]
    Linear qkv, output;
    const float *q_norm, *k_norm;  // [head_dim], or null
    const float* mlp_norm;         // [hidden]
    Linear gate_up, down;
};

struct Shape {
    int64_t hidden, heads, kv_heads, head_dim, page_size;
    int64_t cache_kind;  // kFloat32 or kBfloat16
    float eps;
};

// One step. A token sees the first `seen` slots of its row, and of a tree its ancestors and itself.
struct Step {
    int64_t tokens, threads;
    const float *cosines, *sines;   // [positions, head_dim]
    const int64_t* positions;       // [tokens]
    const int64_t* slots;           // [tokens], where K and V go
    const int32_t* pages;           // page tables of all rows
    const int64_t* first_pages;     // [tokens], where the token's row begins in `pages`
    const int32_t* seen;            // [tokens]
    const int32_t* ancestors;       // indices into the row's slots
    const int64_t* ancestor_bounds; // [tokens + 1]
};

}  // extern "C"

namespace {

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

// Threads

void relax() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

// The threads that help one caller. A loop is cut into parts, and whoever comes takes the next; the caller never waits
// for a thread that has not come. OpenMP's loops do, which makes them many times slower once another process wants a
// core. Helpers spin for a while after a loop, longer than a step pauses between two, and then sleep.
class Pool {
  public:
    ~Pool() {
        stop_.store(true);
        publish(0, 0, nullptr, nullptr);
        for (std::thread& thread : threads_) thread.join();
    }

    // Calls body(part) once for each part in [0, parts) on up to `threads` threads, the caller's among them.
    void run(int64_t parts, int64_t threads, void (*body)(const void*, int64_t), const void* context) {
        for (int64_t i = threads_.size(); i < threads - 1; i++) threads_.emplace_back([this, i] { help(i); });
        publish(parts, threads - 1, body, context);
        take();
        while (done_.load(std::memory_order_acquire) < parts) relax();
    }

  private:
    static constexpr int kSpins = 5000;  // some 0.1 ms
    static constexpr int kBits = 20;     // of a part's index and of the count of parts in a ticket

    void publish(int64_t parts, int64_t helpers, void (*body)(const void*, int64_t), const void* context) {
        body_ = body;
        context_ = context;
        helpers_.store(helpers, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        // A ticket says how many parts its loop has, so that one drawn late cannot be mistaken for the next loop's.
        ticket_.store(static_cast<uint64_t>(parts) << kBits, std::memory_order_release);
        loop_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst)) loop_.notify_all();
    }

    void take() {
        constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
        for (;;) {
            const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
            const int64_t part = ticket & kMask, parts = ticket >> kBits;
            if (part >= parts) return;
            body_(context_, part);  // of the ticket's loop, which cannot end before this part is done
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    void help(int64_t index) {
        for (uint32_t seen = 0;;) {
            uint32_t now = loop_.load(std::memory_order_acquire);
            for (int i = 0; now == seen && i < kSpins; i++, now = loop_.load(std::memory_order_acquire)) relax();
            if (now == seen) {
                asleep_.fetch_add(1, std::memory_order_seq_cst);
                loop_.wait(seen);
                asleep_.fetch_sub(1, std::memory_order_seq_cst);
                continue;
            }
            seen = now;
            if (stop_.load()) return;
            if (index < helpers_.load(std::memory_order_relaxed)) take();
        }
    }

    std::vector<std::thread> threads_;
    void (*body_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    std::atomic<int64_t> helpers_{0}, done_{0};
    std::atomic<uint64_t> ticket_{0};
    std::atomic<uint32_t> loop_{0}, asleep_{0};
    std::atomic<bool> stop_{false};
};

thread_local Pool pool;  // of the thread that calls

// Calls body(begin, end) on parts of [0, count). Fewer than `least` are not worth sharing.
template <class Body>
void parallel(int64_t count, int64_t threads, int64_t least, const Body& body) {
    if (threads == 1 || count < least) {
        body(int64_t{0}, count);
        return;
    }
    const int64_t parts = std::min(count, 4 * threads);
    const auto run_part = [&](int64_t part) { body(count * part / parts, count * (part + 1) / parts); };
    using Part = decltype(run_part);
    const auto call = [](const void* context, int64_t part) { (*static_cast<const Part*>(context))(part); };
    pool.run(parts, threads, call, &run_part);
}

// Norms and operands

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

// Rows of x, normed if there is a norm, in the form for `linear`.
Operand prepare(const Linear& linear, const float* norm, float eps, const float* x, int64_t rows, int64_t threads) {
    const int64_t in = linear.in, groups = in / kGroup;
    Operand operand;
    if (linear.kind == kFloat32 && !norm) {
        operand.floats = x;
        return operand;
    }
    float* floats = norm || linear.kind == kFloat32 ? work.floats.room(rows * in) : nullptr;
    uint16_t* halves = linear.kind == kBfloat16 ? work.halves.room(rows * in) : nullptr;
    int8_t* bytes = linear.kind == kInt8 ? work.bytes.room(rows * in) : nullptr;
    float* scales = bytes ? work.scales.room(rows * groups) : nullptr;
    int32_t* offsets = bytes ? work.offsets.room(rows * groups) : nullptr;
    parallel(rows, threads, 8, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const float* row = x + r * in;
            if (norm) {
                rms_norm(row, norm, in, eps, floats + r * in);
                row = floats + r * in;
            }
            if (halves)
                for (int64_t i = 0; i < in; i += kLanes) store(halves + r * in + i, load(row + i));
            if (bytes) quantize_row(row, in, bytes + r * in, scales + r * groups, offsets + r * groups);
        }
    });
    operand = {floats, halves, bytes, scales, offsets};
    return operand;
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

// Attention

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

// Packing

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

extern "C" {

// Weights [out, in] of `bytes` each (4, 2 or 1) into panels; `out` a multiple of 32, `in` one of `unit`.
void pilotfish_pack(int64_t bytes, const void* from, int64_t out, int64_t in, int64_t unit, void* to) {
    if (bytes == 4) pack(static_cast<const uint32_t*>(from), out, in, unit, static_cast<uint32_t*>(to));
    if (bytes == 2) pack(static_cast<const uint16_t*>(from), out, in, unit, static_cast<uint16_t*>(to));
    if (bytes == 1) pack(static_cast<const uint8_t*>(from), out, in, unit, static_cast<uint8_t*>(to));
}

// y = norm(x) @ weights.T + bias: [rows, in] to [rows, width], the first `width` outputs; without a norm if null.
void pilotfish_linear(const Linear* linear, const float* norm, float eps, const float* x, int64_t rows, int64_t width,
                      int64_t threads, float* y) {
    const Operand operand = prepare(*linear, norm, eps, x, rows, threads);
    product(*linear, operand, rows, threads, [=](int64_t row, int64_t panel, Floats y0, Floats y1) {
        for (int p = 0; p < 2; p++) {
            const int64_t first = panel * kPanel + p * kLanes, lanes = std::min<int64_t>(kLanes, width - first);
            if (lanes > 0) std::memcpy(y + row * width + first, p ? &y1 : &y0, lanes * sizeof(float));
        }
    });
}

// Rows of the weights, [count, in]: the embeddings of `ids`.
void pilotfish_embed(const Linear* linear, const int64_t* ids, int64_t count, float* y) {
    for (int64_t n = 0; n < count; n++)
        for (int64_t i = 0; i < linear->in; i++) y[n * linear->in + i] = weight(*linear, ids[n], i);
}

// Attention of q [tokens, heads, head_dim], already rotated, over one layer of the cache.
void pilotfish_attention(const Shape* shape, const Step* step, const float* q, void* kv, float* out) {
    const int64_t stride = shape->heads * shape->head_dim;
    (shape->cache_kind == kFloat32 ? attention<float> : attention<uint16_t>)(*shape, *step, q, stride, kv, out);
}

// One layer: x [tokens, hidden] changes in place, K and V go to the cache.
static void run_layer(const Shape* shape, const Layer* layer, const Step* step, float* x, void* kv) {
    const int64_t tokens = step->tokens, threads = step->threads, hidden = shape->hidden;
    const int64_t q_width = shape->heads * shape->head_dim, width = q_width + 2 * shape->kv_heads * shape->head_dim;
    const bool is_float = shape->cache_kind == kFloat32;

    float* qkv = work.qkv.room(tokens * width);
    pilotfish_linear(&layer->qkv, layer->attention_norm, shape->eps, x, tokens, width, threads, qkv);
    (is_float ? place<float> : place<uint16_t>)(*shape, *layer, *step, qkv, kv);
    float* context = work.context.room(tokens * q_width);
    (is_float ? attention<float> : attention<uint16_t>)(*shape, *step, qkv, width, kv, context);

    const auto add = [=](int64_t row, int64_t panel, Floats y0, Floats y1) {
        float* to = x + row * hidden + panel * kPanel;
        store(to, load(to) + y0);
        store(to + kLanes, load(to + kLanes) + y1);
    };
    product(layer->output, prepare(layer->output, nullptr, 0, context, tokens, threads), tokens, threads, add);

    const int64_t inner_size = layer->down.in;
    float* inner = work.inner.room(tokens * inner_size);
    const auto gate = [=](int64_t row, int64_t panel, Floats y0, Floats y1) {
        store(inner + row * inner_size + panel * kLanes, silu(y0) * y1);
    };
    const Operand normed = prepare(layer->gate_up, layer->mlp_norm, shape->eps, x, tokens, threads);
    product(layer->gate_up, normed, tokens, threads, gate);
    product(layer->down, prepare(layer->down, nullptr, 0, inner, tokens, threads), tokens, threads, add);
}

// Consecutive layers, whose caches lie `kv_bytes` apart.
void pilotfish_layers(const Shape* shape, const Layer* layers, int64_t count, const Step* step, float* x, void* kv,
                      int64_t kv_bytes) {
    for (int64_t i = 0; i < count; i++) run_layer(shape, layers + i, step, x, static_cast<char*>(kv) + i * kv_bytes);
}

}  // extern "C"
