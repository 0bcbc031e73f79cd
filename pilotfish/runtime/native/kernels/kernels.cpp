// What ctypes calls: a Llama-family decoder on a CPU, fused.
//
// Everything between the weights and the cache is float32. Weights are float32, bfloat16, or int8 in groups of 32 with
// a scale each; the cache is float32 or bfloat16. No sum depends on what else is in the batch: every output is added up
// in one order, so a row's numbers are the same alone and in any company.
//
// Written with GCC's vector types, which any processor can run; what AVX-512 has for bfloat16 and int8 is used where
// there is. Plain structs, no exceptions, no torch headers.

#include <cstdint>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "packing.h"
#include "structs.h"

extern "C" {

// Weights [out, in] of `bytes` each (4, 2 or 1) into panels; `out` a multiple of 32, `in` one of `unit`.
void pilotfish_pack(int64_t bytes, const void* from, int64_t out, int64_t in, int64_t unit, void* to) {
    if (bytes == 4) pack(static_cast<const uint32_t*>(from), out, in, unit, static_cast<uint32_t*>(to));
    if (bytes == 2) pack(static_cast<const uint16_t*>(from), out, in, unit, static_cast<uint16_t*>(to));
    if (bytes == 1) pack(static_cast<const uint8_t*>(from), out, in, unit, static_cast<uint8_t*>(to));
}

// y = [norm(part) ; ...] @ weights.T + bias: `count` parts of [rows, their width] to [rows, width], the first `width`
// outputs.
void pilotfish_linear(const Linear* linear, const Part* parts, int64_t count, float eps, int64_t rows, int64_t width,
                      int64_t threads, float* y) {
    run_linear(*linear, prepare(*linear, parts, count, eps, rows, threads), rows, width, threads, y);
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

// Consecutive layers, whose caches lie `kv_bytes` apart.
void pilotfish_layers(const Shape* shape, const Layer* layers, int64_t count, const Step* step, float* x,
                      const float* beside, void* kv, int64_t kv_bytes) {
    for (int64_t i = 0; i < count; i++)
        run_layer(*shape, layers[i], *step, x, beside, static_cast<char*>(kv) + i * kv_bytes);
}

}  // extern "C"
