// What Python hands over; `library.py` has the same structs.

#pragma once

#include <cstdint>

constexpr int kPanel = 32;  // outputs side by side in packed weights: two vectors
constexpr int kGroup = 32;  // int8 weights that share a scale

enum Kind : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

extern "C" {

// Weights [out, in] in panels of 32 outputs, see `pilotfish_pack`: a product reads them from end to end, once. In a
// gated layer a panel is 16 gates and their 16 partners.
struct Linear {
    int64_t kind, out, in;
    const void* weights;
    const uint16_t* scales;  // bfloat16 [out / 32, in / 32, 32]; int8 only
    const float* bias;       // [out], in the order of the panels, or null
};

// One of the inputs that stand side by side before a product, [rows, width].
struct Part {
    const float* x;
    int64_t stride;     // values from one row to the next
    int64_t width;      // a multiple of 32
    const float* norm;  // [width], or null
};

// Norms may be null, and are left out then.
struct Layer {
    int64_t has_beside;                          // attention is over [beside ; x], so that qkv has twice the inputs
    const float *beside_norm, *attention_norm;   // [hidden]
    Linear qkv, output;
    const float *q_norm, *k_norm;  // [head_dim]
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
