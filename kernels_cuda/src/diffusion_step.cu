// diffusion_step: everything a sampler does to the latent between two evaluations of the model.
//
//   m    = uncond + cfg * (cond - uncond)              classifier-free guidance; linear, so it may be applied to
//   whatever
//                                                      the model predicts, before that is turned into anything else
//   next = x + (s' - s) * m                            Euler, m a velocity (flow matching) or eps: both are d/ds of x
//   next = x + (s' - s) / s * (x - m)                  Euler, m the denoised latent
//   next = sqrt(a') * x0 + sqrt(1 - a') * eps          DDIM without noise, from x = sqrt(a) x0 + sqrt(1 - a) eps, where
//                                                      the model predicts eps, x0 or v = sqrt(a) eps - sqrt(1 - a) x0
//   out  = clamp((1 - w) * next + w * previous)        w = blend * (1 - mask): where mask is 1 all is new
//
// The pair (s, s'), or (a, a') for DDIM, is read from device memory, so that one captured graph serves every step and
// the host never waits for a sigma. There may be one pair for each batch.
//
// Layout. [batch, row, column] with any strides; the mask broadcasts. out: contiguous, of x's type.
//
// Bytes per element (float latent, half model output): 4 + 2 (+ 2 uncond) (+ 4 previous) read, 4 written. Stock does it
// in six to ten passes.
//
// Access: tiles.cuh. All arithmetic is float, rounded once.
//
// `diffusion_step_any` serves every other layout and mix of types, an element at a time.

#include "tiles.cuh"

enum Prediction { kVelocity, kEps, kDenoised };

// Mirrored by StepParams in ops/elementwise/diffusion_step.py. Pointers first.
struct StepParams {
    const void* x;
    const void* cond;
    const void* uncond;    // null: no guidance
    const void* previous;  // null: no blend
    const void* mask;      // null: 0, all of `blend`
    const float* pair;     // (s, s') or (a, a')
    void* out;
    Place x_place, cond_place, uncond_place, previous_place, mask_place, pair_place, out_place;
    Extent extent;
    i64 pair_step;  // from s to s'
    float cfg, blend, low, high;
    int is_ddim, prediction, is_clamped;
    int mask_is_float;
    int x_is_float, cond_is_float, uncond_is_float, previous_is_float;  // `any` only
};

// next = base * x + turn * m + slope * (x - m): which of them are not zero depends on what the model predicts.
struct Step {
    float base, turn, slope;

    __device__ Step(const StepParams& p, i64 at) {
        const float now = p.pair[at], then = p.pair[at + p.pair_step];
        base = 1, turn = 0, slope = 0;
        if (!p.is_ddim) {
            if (p.prediction == kDenoised) {
                slope = (then - now) / now;
            } else {
                turn = then - now;
            }
            return;
        }
        const float signal = sqrtf(now), noise = sqrtf(1.0f - now);
        const float next_signal = sqrtf(then), next_noise = sqrtf(1.0f - then);
        if (p.prediction == kEps) {
            base = next_signal / signal;
            turn = next_noise - base * noise;
        } else if (p.prediction == kDenoised) {
            base = next_noise / noise;
            turn = next_signal - base * signal;
        } else {
            base = next_signal * signal + next_noise * noise;
            turn = next_noise * signal - next_signal * noise;
        }
    }

    __device__ float next(float x, float m) const {
        return slope != 0.0f ? fmaf(slope, x - m, x) : fmaf(turn, m, base * x);
    }
};

__device__ inline float guided(float cfg, float cond, float uncond) {
    return fmaf(cfg, cond - uncond, uncond);
}

__device__ inline float blended(const StepParams& p, float value, float previous, float mask) {
    const float w = p.blend * (1.0f - mask);
    return fmaf(w, previous, (1.0f - w) * value);
}

// A NaN is neither below nor above, and stays.
__device__ inline float clamped(const StepParams& p, float value) {
    if (!p.is_clamped) return value;
    return value < p.low ? p.low : value > p.high ? p.high : value;
}

// The mask under a thread's packs: four of its elements at a time, or one for the whole row.
template <bool kQuads>
__device__ inline void load_mask(const StepParams& p, const Chunk<kQuads>& chunk, i64 row,
                                 float (&mask)[kTilePacks][kPack]) {
    const float all = p.mask_place.column == 0 ? load_element(p.mask, row, p.mask_is_float) : 0.0f;
#pragma unroll
    for (int v = 0; v < kTilePacks; v++) {
#pragma unroll
        for (int i = 0; i < kPack; i += kQuad) {
            const i64 at = row + chunk.start + chunk.at(v, i);
            if (p.mask_place.column == 0 || !chunk.columns.has(v, i)) {
                mask[v][i] = mask[v][i + 1] = mask[v][i + 2] = mask[v][i + 3] = all;
            } else if (p.mask_is_float) {
                unsigned words[4];
                load_words<Reading::kCached>(words, static_cast<const float*>(p.mask) + at);
#pragma unroll
                for (int j = 0; j < kQuad; j++) mask[v][i + j] = __uint_as_float(words[j]);
            } else {
                unsigned words[2];
                load_words<Reading::kCached>(words, static_cast<const __half*>(p.mask) + at);
                const float2 low = to_floats(words[0]), high = to_floats(words[1]);
                mask[v][i] = low.x, mask[v][i + 1] = low.y, mask[v][i + 2] = high.x, mask[v][i + 3] = high.y;
            }
        }
    }
}

// X: type of x, previous and out. M: type of the model's output.
template <typename X, typename M>
__device__ void step_rows(const StepParams& p) {
    for_each_row(p.extent, [&](i64 batch, i64 row) {
        const X* x = static_cast<const X*>(p.x) + p.x_place.at(batch, row);
        const M* cond = static_cast<const M*>(p.cond) + p.cond_place.at(batch, row);
        const M* uncond = static_cast<const M*>(p.uncond) + p.uncond_place.at(batch, row);
        const X* previous = static_cast<const X*>(p.previous) + p.previous_place.at(batch, row);
        X* out = static_cast<X*>(p.out) + p.out_place.at(batch, row);
        const Chunk<sizeof(X) == 4 || sizeof(M) == 4> chunk(p.extent);
        Pack<X> old[kTilePacks], before[kTilePacks];
        Pack<M> with[kTilePacks], without[kTilePacks];
        chunk.columns.template load<Reading::kStreaming>(old, x + chunk.start);
        chunk.columns.template load<Reading::kStreaming>(with, cond + chunk.start);
        if (p.uncond != nullptr) chunk.columns.template load<Reading::kStreaming>(without, uncond + chunk.start);
        if (p.previous != nullptr) chunk.columns.template load<Reading::kStreaming>(before, previous + chunk.start);
        float mask[kTilePacks][kPack] = {};
        if (p.mask != nullptr) load_mask(p, chunk, p.mask_place.at(batch, row), mask);
        const Step step(p, p.pair_place.at(batch, row));
#pragma unroll
        for (int v = 0; v < kTilePacks; v++) {
            float value[kPack], m[kPack];
            unpack(old[v], value);
            unpack(with[v], m);
            if (p.uncond != nullptr) {
                float u[kPack];
                unpack(without[v], u);
#pragma unroll
                for (int i = 0; i < kPack; i++) m[i] = guided(p.cfg, m[i], u[i]);
            }
#pragma unroll
            for (int i = 0; i < kPack; i++) value[i] = step.next(value[i], m[i]);
            if (p.previous != nullptr) {
                float other[kPack];
                unpack(before[v], other);
#pragma unroll
                for (int i = 0; i < kPack; i++) value[i] = blended(p, value[i], other[i], mask[v][i]);
            }
#pragma unroll
            for (int i = 0; i < kPack; i++) value[i] = clamped(p, value[i]);
            Pack<X> result;
            pack(value, result);
            chunk.store(out, v, result);
        }
    });
}

extern "C" __global__ void __launch_bounds__(kTileThreads) diffusion_step_any(const __grid_constant__ StepParams p) {
    for_each_row(p.extent, [&](i64 batch, i64 row) {
        const i64 x_at = p.x_place.at(batch, row), cond_at = p.cond_place.at(batch, row);
        const i64 uncond_at = p.uncond_place.at(batch, row), previous_at = p.previous_place.at(batch, row);
        const i64 mask_at = p.mask_place.at(batch, row), pair_at = p.pair_place.at(batch, row);
        const i64 out_at = p.out_place.at(batch, row);
#pragma unroll 1
        for (int i = 0; i < kTileElements; i++) {
            const i64 column = element_column(i);
            if (column >= p.extent.width) continue;
            const Step step(p, pair_at + column * p.pair_place.column);
            float m = load_element(p.cond, cond_at + column * p.cond_place.column, p.cond_is_float);
            if (p.uncond != nullptr) {
                m = guided(p.cfg, m,
                           load_element(p.uncond, uncond_at + column * p.uncond_place.column, p.uncond_is_float));
            }
            float value = step.next(load_element(p.x, x_at + column * p.x_place.column, p.x_is_float), m);
            if (p.previous != nullptr) {
                const i64 at = mask_at + column * p.mask_place.column;
                value = blended(
                    p, value,
                    load_element(p.previous, previous_at + column * p.previous_place.column, p.previous_is_float),
                    p.mask != nullptr ? load_element(p.mask, at, p.mask_is_float) : 0.0f);
            }
            store_element(p.out, out_at + column * p.out_place.column, p.x_is_float, clamped(p, value));
        }
    });
}

#define DIFFUSION_STEP(NAME, X, M)                                                                          \
    extern "C" __global__ void __launch_bounds__(kTileThreads) NAME(const __grid_constant__ StepParams p) { \
        step_rows<X, M>(p);                                                                                 \
    }
// Names say the type of the latent and of the model's output.
DIFFUSION_STEP(diffusion_step_f16_f16, __half, __half)
DIFFUSION_STEP(diffusion_step_f16_f32, __half, float)
DIFFUSION_STEP(diffusion_step_f32_f16, float, __half)
DIFFUSION_STEP(diffusion_step_f32_f32, float, float)
