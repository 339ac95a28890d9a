// rms_rope: what happens to q and k between their projection and attention, in one pass over both.
//
//   n   = x * rsqrt(mean(x^2) + eps) * weight     the mean over all heads of a token (Wan) or over one head (Flux,
//   Qwen3) out = a * n + b * partner(n)                  RoPE: every element is turned with one other element of its
//   head
//
// The partner is the neighbour (interleaved: 2j and 2j+1) or the element half a head away (half-split: j and j + d/2).
// Rotations are 2x2 matrices [pair][row][column], as ComfyUI hands them to Flux and Wan, or cosines and sines per pair.
//
// Layout. q and k: [batch, token, head, d] with any strides but the last, so the two thirds of a packed [b, s, 3*h*d]
// buffer are served where they lie; `out` may be the input (every element is read by the thread that writes it, before
// it writes). q and k may differ in tokens and heads (cross attention, grouped queries); k may be absent. A rotation
// belongs to a token, or to a batch and a token, and all heads share it.
//
// Bytes per element (half): 2 read + 2 written. The rotations of a token (matrices: 8*d bytes) are read from device
// memory once: Wan 1.3B has 1 KB of them to 12 KB of q and k.
//
// Access. A block owns a run of tokens and walks their rows, q0 k0 q1 k1 .., each held in registers: V packs of 8
// elements per thread, the next row on its way while this one is reduced. The threads of a block span whole heads, so
// the columns a thread owns lie at one place of their heads whatever the pack: 16 coefficients per thread serve all its
// packs of q and of k. A half-split partner is a lane of the same warp. Weights are read again for every row, from L1.
//
// All arithmetic is float; the output is rounded once, after the rotation (stock also rounds between norm and
// rotation).
//
// `rms_rope_any` serves the rest: heads that are no power of two, odd strides and addresses, very wide rows.

#include "reduce.cuh"
#include "vector.cuh"

// Mirrored by RmsRopeParams in ops/rms_rope.py. Pointers first. Pairs are (q, k).
struct RmsRopeParams {
    const void* x[2];
    void* out[2];
    const void* weight[2];  // null: ones
    const void* rotation;   // null: no RoPE. Matrices, or cosines if there are sines
    const void* sines;
    i64 x_batch[2], x_token[2], x_head[2];  // strides, in elements
    i64 out_batch[2], out_token[2], out_head[2];
    i64 rotation_batch, rotation_token;
    i64 sines_batch, sines_token;
    i64 batches;
    i64 tokens[2];
    int heads[2];
    int d;
    int tokens_per_block;
    float eps;
    int normalised;  // 0: RoPE alone
    int per_head;    // `any` only: the others have it in their name
    int interleaved;
    int weight_is_float, rotation_is_float;
};

// N = 2 or 4 neighbouring elements of a table whose type is known only at run time.
__device__ inline void load_pair(const void* base, i64 index, bool is_float, float (&out)[2]) {
    if (is_float) {
        const float2 wide = *reinterpret_cast<const float2*>(static_cast<const float*>(base) + index);
        out[0] = wide.x, out[1] = wide.y;
    } else {
        const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(base) + index));
        out[0] = wide.x, out[1] = wide.y;
    }
}
__device__ inline void load_four(const void* base, i64 index, bool is_float, float (&out)[4]) {
    if (is_float) {
        const float4 wide = *reinterpret_cast<const float4*>(static_cast<const float*>(base) + index);
        out[0] = wide.x, out[1] = wide.y, out[2] = wide.z, out[3] = wide.w;
    } else {
        const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const __half*>(base) + index);
        const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
        const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
        out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
    }
}

// What the eight elements from `column` of a head are turned with: out = a * x + b * partner.
struct Rotation {
    float a[kPack], b[kPack];

    __device__ void load(const RmsRopeParams& p, i64 batch, i64 token, int column) {
        const i64 at = batch * p.rotation_batch + token * p.rotation_token;
        const i64 sines_at = batch * p.sines_batch + token * p.sines_token;
        const bool wide = p.rotation_is_float;
        if (p.interleaved) {
            if (p.sines == nullptr) {
#pragma unroll
                for (int j = 0; j < kPack / 2; j++) {
                    float m[4];
                    load_four(p.rotation, at + (column / 2 + j) * 4, wide, m);
                    a[2 * j] = m[0], b[2 * j] = m[1], b[2 * j + 1] = m[2], a[2 * j + 1] = m[3];
                }
            } else {
                float c[4], s[4];
                load_four(p.rotation, at + column / 2, wide, c);
                load_four(p.sines, sines_at + column / 2, wide, s);
#pragma unroll
                for (int j = 0; j < kPack / 2; j++) {
                    a[2 * j] = a[2 * j + 1] = c[j];
                    b[2 * j] = -s[j], b[2 * j + 1] = s[j];
                }
            }
            return;
        }
        const bool upper = column >= p.d / 2;
        const int pair = upper ? column - p.d / 2 : column;
        if (p.sines == nullptr) {
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                float m[2];  // one row of the matrix: the lower half wants the first, the upper half the second
                load_pair(p.rotation, at + (pair + i) * 4 + (upper ? 2 : 0), wide, m);
                a[i] = upper ? m[1] : m[0];
                b[i] = upper ? m[0] : m[1];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPack; i += 4) {
                float c[4], s[4];
                load_four(p.rotation, at + pair + i, wide, c);
                load_four(p.sines, sines_at + pair + i, wide, s);
#pragma unroll
                for (int j = 0; j < 4; j++) a[i + j] = c[j], b[i + j] = upper ? s[j] : -s[j];
            }
        }
    }
};

// Where a block is in its walk over rows. part 0: q, part 1: k. A token that only one of them has is visited once.
struct Cursor {
    i64 token;
    int part;

    __device__ void skip(const RmsRopeParams& p, i64 last) {
        while (token < last && token >= p.tokens[part]) step();
    }
    __device__ void step() {
        token += part;
        part ^= 1;
    }
};

template <int V>
struct Row {
    Pack<__half> packs[V];

    __device__ static int column(int v) {
        return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kPack;
    }

    // Beyond the row's end the packs are zero, which no sum notices.
    __device__ void load(const RmsRopeParams& p, i64 batch, const Cursor& at, int log_d) {
        const int width = p.heads[at.part] << log_d;
        const i64 start = batch * p.x_batch[at.part] + at.token * p.x_token[at.part];
#pragma unroll
        for (int v = 0; v < V; v++) {
            const int c = column(v);
            zero(packs[v]);
            if (c < width) {
                const i64 index = start + (c >> log_d) * p.x_head[at.part] + (c & (p.d - 1));
                load_pack<Reading::kStreaming>(packs[v], static_cast<const __half*>(p.x[at.part]) + index);
            }
        }
    }
};

__device__ inline void load_weight(const void* base, int index, bool is_float, float (&out)[kPack]) {
    if (is_float) {
        Pack<float> pack;
        load_pack<Reading::kCached>(pack, static_cast<const float*>(base) + index);
        unpack(pack, out);
    } else {
        Pack<__half> pack;
        load_pack<Reading::kCached>(pack, static_cast<const __half*>(base) + index);
        unpack(pack, out);
    }
}

// d is a power of two from 16 to 256, so a head is a group of 2 to 32 neighbouring lanes.
template <int V, bool kPerHead, int kWarps>
__device__ void rms_rope_rows(const RmsRopeParams& p) {
    __shared__ typename BlockSum<kWarps>::Slots slots;
    BlockSum<kWarps> block_sum(slots);
    const int log_d = 31 - __clz(p.d);
    const int lanes = p.d / kPack;
    const int within = Row<V>::column(0) & (p.d - 1);  // and of every other pack: a block spans whole heads
    const i64 first = static_cast<i64>(blockIdx.x) * p.tokens_per_block;
    const i64 last = min(first + p.tokens_per_block, max(p.tokens[0], p.tokens[1]));

    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
        Cursor ahead = {first, 0};
        ahead.skip(p, last);
        Row<V> next;
        next.load(p, batch, ahead, log_d);
        Rotation turn;
        i64 turn_token = -1;  // whose rotation is in registers: none yet

        while (ahead.token < last) {
            const Cursor here = ahead;
            const Row<V> row = next;
            const int part = here.part;
            ahead.step();
            ahead.skip(p, last);
            if (ahead.token < last) next.load(p, batch, ahead, log_d);
            if (p.rotation != nullptr && turn_token != here.token) {
                turn.load(p, batch, here.token, within);
                turn_token = here.token;
            }

            float factor[V];
#pragma unroll
            for (int v = 0; v < V; v++) {
                float x[kPack];
                unpack(row.packs[v], x);
                factor[v] = 0;
#pragma unroll
                for (int i = 0; i < kPack; i++) factor[v] = fmaf(x[i], x[i], factor[v]);
            }
            if (!p.normalised) {
#pragma unroll
                for (int v = 0; v < V; v++) factor[v] = 1;
            } else if (kPerHead) {
#pragma unroll
                for (int v = 0; v < V; v++) {
                    for (int offset = lanes / 2; offset > 0; offset /= 2) {
                        factor[v] += __shfl_xor_sync(0xffffffffu, factor[v], offset);
                    }
                    factor[v] = rsqrtf(factor[v] / p.d + p.eps);
                }
            } else {
                float squares = 0;
#pragma unroll
                for (int v = 0; v < V; v++) squares += factor[v];
                const float width = static_cast<float>(p.heads[part] << log_d);
                const float scale = rsqrtf(block_sum(squares) / width + p.eps);
#pragma unroll
                for (int v = 0; v < V; v++) factor[v] = scale;
            }

            const int width = p.heads[part] << log_d;
            const i64 start = batch * p.out_batch[part] + here.token * p.out_token[part];
#pragma unroll
            for (int v = 0; v < V; v++) {
                const int c = Row<V>::column(v);
                float x[kPack];
                unpack(row.packs[v], x);
#pragma unroll
                for (int i = 0; i < kPack; i++) x[i] *= factor[v];
                if (p.weight[part] != nullptr && c < width) {
                    float weight[kPack];
                    load_weight(p.weight[part], kPerHead ? within : c, p.weight_is_float, weight);
#pragma unroll
                    for (int i = 0; i < kPack; i++) x[i] *= weight[i];
                }
                if (p.rotation != nullptr) {
                    float partner[kPack];
#pragma unroll
                    for (int i = 0; i < kPack; i++) {
                        partner[i] = p.interleaved ? x[i ^ 1] : __shfl_xor_sync(0xffffffffu, x[i], lanes / 2);
                    }
#pragma unroll
                    for (int i = 0; i < kPack; i++) x[i] = fmaf(turn.a[i], x[i], turn.b[i] * partner[i]);
                }
                if (c < width) {
                    Pack<__half> result;
                    pack(x, result);
                    const i64 index = start + (c >> log_d) * p.out_head[part] + (c & (p.d - 1));
                    store_pack(static_cast<__half*>(p.out[part]) + index, result);
                }
            }
        }
    }
}

// Element by element. `lane` of `lanes` threads work on the heads [head, head_end) of one row, which share a factor.
struct Span {
    const __half* x;
    __half* out;
    i64 batch, token;
    int part, head, head_end, lane, lanes;

    __device__ float squares(const RmsRopeParams& p) const {
        float sum = 0;
        for (int h = head; h < head_end; h++) {
            for (int c = lane; c < p.d; c += lanes) {
                const float value = __half2float(x[h * p.x_head[part] + c]);
                sum = fmaf(value, value, sum);
            }
        }
        return sum;
    }

    __device__ float normalised(const RmsRopeParams& p, int h, int c, float factor) const {
        const float value = __half2float(x[h * p.x_head[part] + c]) * factor;
        if (p.weight[part] == nullptr) return value;
        return value * load_element(p.weight[part], p.per_head ? c : h * p.d + c, p.weight_is_float);
    }

    __device__ void write(const RmsRopeParams& p, float factor) const {
        for (int h = head; h < head_end; h++) {
            __half* to = out + h * p.out_head[part];
            if (p.rotation == nullptr) {
#pragma unroll 1
                for (int c = lane; c < p.d; c += lanes) to[c] = __float2half_rn(normalised(p, h, c, factor));
                continue;
            }
#pragma unroll 1
            for (int pair = lane; pair < p.d / 2; pair += lanes) {
                const int c0 = p.interleaved ? 2 * pair : pair, c1 = p.interleaved ? c0 + 1 : pair + p.d / 2;
                const i64 at =
                    batch * p.rotation_batch + token * p.rotation_token + pair * (p.sines == nullptr ? 4 : 1);
                float m00 = load_element(p.rotation, at, p.rotation_is_float), m01, m10, m11;
                if (p.sines == nullptr) {
                    m01 = load_element(p.rotation, at + 1, p.rotation_is_float);
                    m10 = load_element(p.rotation, at + 2, p.rotation_is_float);
                    m11 = load_element(p.rotation, at + 3, p.rotation_is_float);
                } else {
                    m10 = load_element(p.sines, batch * p.sines_batch + token * p.sines_token + pair,
                                       p.rotation_is_float);
                    m01 = -m10, m11 = m00;
                }
                // Both are read before either is written: `out` may be `x`.
                const float x0 = normalised(p, h, c0, factor), x1 = normalised(p, h, c1, factor);
                to[c0] = __float2half_rn(fmaf(m00, x0, m01 * x1));
                to[c1] = __float2half_rn(fmaf(m11, x1, m10 * x0));
            }
        }
    }
};

// A mean over a head: a warp per head. Over the token, or none: the block takes all heads.
__device__ inline void rms_rope_token(const RmsRopeParams& p, i64 batch, i64 token, int part, BlockSum<8>& block_sum) {
    const int thread = threadIdx.x, step = p.per_head ? blockDim.x / 32 : 1;
    Span row;
    row.x = static_cast<const __half*>(p.x[part]) + batch * p.x_batch[part] + token * p.x_token[part];
    row.out = static_cast<__half*>(p.out[part]) + batch * p.out_batch[part] + token * p.out_token[part];
    row.batch = batch, row.token = token, row.part = part;
    row.lane = p.per_head ? thread % 32 : thread, row.lanes = p.per_head ? 32 : blockDim.x;
    const int end = p.per_head ? p.heads[part] : 1;
    for (int group = p.per_head ? thread / 32 : 0; group < end; group += step) {
        row.head = group, row.head_end = p.per_head ? group + 1 : p.heads[part];
        float factor = 1;
        if (p.normalised) {
            const float sum = row.squares(p);
            const float width = static_cast<float>(row.head_end - row.head) * p.d;
            factor = rsqrtf((p.per_head ? warp_sum(sum) : block_sum(sum)) / width + p.eps);
        }
        row.write(p, factor);
    }
}

extern "C" __global__ void __launch_bounds__(256) rms_rope_any(const __grid_constant__ RmsRopeParams p) {
    __shared__ BlockSum<8>::Slots slots;
    BlockSum<8> block_sum(slots);
    const i64 most = max(p.tokens[0], p.tokens[1]);
    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
        for (i64 token = blockIdx.x; token < most; token += gridDim.x) {
#pragma unroll 1
            for (int part = 0; part < 2; part++) {
                if (token < p.tokens[part]) rms_rope_token(p, batch, token, part, block_sum);
            }
        }
    }
}

#define RMS_ROPE_ROWS(NAME, V, PER_HEAD, THREADS, BLOCKS)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ RmsRopeParams p) { \
        rms_rope_rows<V, PER_HEAD, THREADS / 32>(p);                                                              \
    }
// Names say over what the mean is taken, and the packs per thread (BLOCKS in ops/norm_modulate.py).
RMS_ROPE_ROWS(rms_rope_token_2, 2, false, 384, 2)
RMS_ROPE_ROWS(rms_rope_token_3, 3, false, 256, 2)
RMS_ROPE_ROWS(rms_rope_token_4, 4, false, 256, 2)
RMS_ROPE_ROWS(rms_rope_head_2, 2, true, 384, 1)  // with two blocks in mind sm_75 would spill
RMS_ROPE_ROWS(rms_rope_head_3, 3, true, 256, 2)
RMS_ROPE_ROWS(rms_rope_head_4, 4, true, 256, 2)
