// One decoder layer: attention, then the gated unit, each behind its norm and added to the residual stream.

#pragma once

#include <cstdint>

#include "attention.h"
#include "linear.h"
#include "structs.h"
#include "vectors.h"

namespace {

// One layer: x [tokens, hidden] changes in place, K and V go to the cache. `beside` [tokens, hidden] is read where the
// layer has it.
void run_layer(const Shape& shape, const Layer& layer, const Step& step, float* x, const float* beside, void* kv) {
    const int64_t tokens = step.tokens, threads = step.threads, hidden = shape.hidden;
    const int64_t q_width = shape.heads * shape.head_dim, width = q_width + 2 * shape.kv_heads * shape.head_dim;
    const bool is_float = shape.cache_kind == kFloat32;

    float* qkv = work.qkv.room(tokens * width);
    const Part parts[] = {{beside, hidden, hidden, layer.beside_norm}, {x, hidden, hidden, layer.attention_norm}};
    const int64_t skipped = layer.has_beside ? 0 : 1;
    run_linear(layer.qkv, prepare(layer.qkv, parts + skipped, 2 - skipped, shape.eps, tokens, threads), tokens, width,
               threads, qkv);
    (is_float ? place<float> : place<uint16_t>)(shape, layer, step, qkv, kv);
    float* context = work.context.room(tokens * q_width);
    (is_float ? attention<float> : attention<uint16_t>)(shape, step, qkv, width, kv, context);

    const auto add = [=](int64_t row, int64_t panel, Floats y0, Floats y1) {
        float* to = x + row * hidden + panel * kPanel;
        store(to, load(to) + y0);
        store(to + kLanes, load(to + kLanes) + y1);
    };
    product(layer.output, prepare(layer.output, nullptr, 0, context, tokens, threads), tokens, threads, add);

    const int64_t inner_size = layer.down.in;
    float* inner = work.inner.room(tokens * inner_size);
    const auto gate = [=](int64_t row, int64_t panel, Floats y0, Floats y1) {
        store(inner + row * inner_size + panel * kLanes, silu(y0) * y1);
    };
    const Operand normed = prepare(layer.gate_up, layer.mlp_norm, shape.eps, x, tokens, threads);
    product(layer.gate_up, normed, tokens, threads, gate);
    product(layer.down, prepare(layer.down, nullptr, 0, inner, tokens, threads), tokens, threads, add);
}

}  // namespace
