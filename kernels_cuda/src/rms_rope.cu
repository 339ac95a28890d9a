// rms_rope_: what happens to q and k between their projection and attention, in one pass over both, in place.
//
//   n = x * rsqrt(mean(x^2) + eps) * weight    the mean over all heads of a token (Wan) or over one head (Flux, Qwen3)
//   x = a * n + b * partner(n)                 RoPE: every element is turned with one other element of its head
//
// The partner is the neighbour (interleaved: 2j and 2j+1) or the element half a head away (half-split: j and j + d/2).
// Rotations are 2x2 matrices [pair][row][column], as ComfyUI hands them to Flux and Wan, or cosines and sines per pair.
//
// Layout. q and k: [batch, token, head, d] with any strides but the last, so the two thirds of a packed [b, s, 3*h*d]
// buffer are served where they lie. Every element is read by the thread that writes it, before it writes, and for the
// mean by threads of its block that are through with reading when the first writes. q and k may differ in tokens and
// heads (cross attention, grouped queries); k may be absent. A rotation belongs to a token, or to a batch and a token,
// and all heads share it.
//
// Bytes per element (half, bf16): 2 read + 2 written. The rotations of a token (matrices: 8*d bytes) are read from
// device memory once: Wan 1.3B has 1 KB of them to 12 KB of q and k.
//
// Access. A piece of a row belongs to one warp, which holds all of it packed in registers: V packs of 8 elements per
// lane, all loads on their way together, no barrier, no second row: tens of warps at different places of their work
// keep the memory busy. A mean over the token needs the whole row in one piece (Wan 1.3B: 6 packs, 14B: 20); rows that
// are wider, or so few that warps run out, are cut over the four warps of a block. Means over heads are free to cut
// rows anywhere between heads. The pieces of q and k of one token lie in one block, so the second finds the rotations
// in L1.
//
// All packs of a thread lie at the same place of their heads, so one set of coefficients serves them all. For
// interleaved pairs neighbouring lanes hold neighbouring packs; for half-split ones a lane holds a pack and the one
// half a head away, so that partners are in one thread.
//
// All arithmetic is float; the output is rounded once, after the rotation (stock also rounds between norm and
// rotation).
//
// `rms_rope_any` and, of bf16, `rms_rope_bf16_any` serve the rest: heads that are no power of two, odd strides and
// addresses, very wide rows.

#include "packs.cuh"
#include "reduce.cuh"

// Mirrored by RmsRopeParams in ops/norm/rms_rope.py. Pointers first. Pairs are (q, k).
struct RmsRopeParams {
    void* x[2];             // read, and written
    const void* weight[2];  // null: ones
    const void* rotation;   // null: no RoPE. Matrices, or cosines if there are sines
    const void* sines;
    i64 x_batch[2], x_token[2], x_head[2];  // strides, in elements
    i64 rotation_batch, rotation_token;
    i64 sines_batch, sines_token;
    i64 batches;
    i64 tokens[2];
    int heads[2];
    int d;
    int pieces[2];  // of a row; together: of a token
    float eps;
    int normalised;  // 0: RoPE alone
    int per_head;    // `any` only: the others have it in their name
    int interleaved;
    int weight_is_float, rotation_is_float;
};

// Four neighbouring elements of a table whose type is known only at run time. X: the type of two bytes that it may
// have, here and below that of q and k.
template <typename X>
__device__ inline void load_four(const void* base, i64 index, bool is_float, float (&out)[4]) {
    if (is_float) {
        unsigned words[4];
        load_words<Reading::kCached>(words, static_cast<const float*>(base) + index);
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = __uint_as_float(words[i]);
    } else {
        unsigned words[2];
        load_words<Reading::kCached>(words, static_cast<const X*>(base) + index);
        const float2 low = two_floats<X>(words[0]), high = two_floats<X>(words[1]);
        out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
    }
}

// How the pairs of a head lie, and what they are turned with. kSines: halves, turned by cosines and sines, which take
// half the registers of a matrix. kHalves: by either.
enum Pairs { kNeighbours, kHalves, kSines };

// What a thread's elements are turned with: x = a * x + b * partner. Halves: [0] for the lower half of a head, [1]
// for the upper; of sines one set serves both, because the upper half has the same a and the opposite b.
template <typename X, Pairs kPairs>
struct Rotation {
    static constexpr int kParts = kPairs == kNeighbours ? 1 : 2;
    static constexpr int kSets = kPairs == kHalves ? 2 : 1;
    float a[kSets][kPack], b[kSets][kPack];

    // The pairs of the pack `within` elements into a head.
    __device__ void load(const RmsRopeParams& p, i64 batch, i64 token, int within) {
        const i64 at = batch * p.rotation_batch + token * p.rotation_token;
        const bool wide = p.rotation_is_float;
        constexpr int kCount = kPack * kParts / 2;
        const int pair = within * kParts / 2;
        if (kPairs != kSines && p.sines == nullptr) {
#pragma unroll
            for (int j = 0; j < kCount; j++) {
                float m[4];
                load_four<X>(p.rotation, at + (pair + j) * 4, wide, m);
                set(j, m[0], m[1], m[2], m[3]);
            }
        } else {
            const i64 sines_at = batch * p.sines_batch + token * p.sines_token;
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                float c[4], s[4];
                load_four<X>(p.rotation, at + pair + i, wide, c);
                load_four<X>(p.sines, sines_at + pair + i, wide, s);
#pragma unroll
                for (int j = 0; j < 4; j++) set(i + j, c[j], -s[j], s[j], c[j]);
            }
        }
    }

    __device__ void set(int j, float m00, float m01, float m10, float m11) {
        if constexpr (kPairs == kNeighbours) {
            a[0][2 * j] = m00, b[0][2 * j] = m01, a[0][2 * j + 1] = m11, b[0][2 * j + 1] = m10;
        } else {
            a[0][j] = m00, b[0][j] = m01;
            if constexpr (kPairs == kHalves) a[1][j] = m11, b[1][j] = m10;
        }
    }

    // The packs that turn together.
    __device__ void turn(float (&x)[kParts][kPack]) const {
        if constexpr (kPairs == kNeighbours) {
#pragma unroll
            for (int i = 0; i < kPack; i += 2) {
                const float first = x[0][i], second = x[0][i + 1];
                x[0][i] = fmaf(a[0][i], first, b[0][i] * second);
                x[0][i + 1] = fmaf(a[0][i + 1], second, b[0][i + 1] * first);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPack; i++) {
                const float first = x[0][i], second = x[1][i];
                const float back = kPairs == kSines ? -b[0][i] : b[kSets - 1][i];
                x[0][i] = fmaf(a[0][i], first, b[0][i] * second);
                x[1][i] = fmaf(a[kSets - 1][i], second, back * first);
            }
        }
    }
};

template <typename X>
__device__ inline void load_weight(const void* base, int index, bool is_float, float (&out)[kPack]) {
    if (is_float) {
        Pack<float> pack;
        load_pack<Reading::kCached>(pack, static_cast<const float*>(base) + index);
        unpack(pack, out);
    } else {
        Pack<X> pack;
        load_pack<Reading::kCached>(pack, static_cast<const X*>(base) + index);
        unpack(pack, out);
    }
}

// V packs of a row in each of kThreads threads. d is a power of two from 16 to 256, so a head is a group of
// neighbouring lanes, at most a warp.
template <typename X, int V, int kParts, int kThreads>
struct Piece {
    static constexpr int kTurns = V / kParts;  // groups of packs that turn together
    Pack<X> packs[kTurns][kParts];
    unsigned lanes;   // threads that share a head
    unsigned within;  // where in its head a thread's first pack lies
    unsigned apart;   // and how far on, half a head, the other
    int head, hop;    // the head of the first packs, and how many heads on the next ones are

    __device__ Piece(unsigned thread, int d, int index) {
        const int log_d = 31 - __clz(d);
        lanes = static_cast<unsigned>(d) / (kPack * kParts);
        within = (thread & (lanes - 1)) * kPack;
        apart = static_cast<unsigned>(d) / 2;
        head = (index * (V * kThreads * kPack) + thread * (kPack * kParts)) >> log_d;
        hop = (kThreads * kPack * kParts) >> log_d;
    }

    // Beyond the row's end the packs are zero, which no sum notices.
    __device__ void load(const X* row, i64 head_stride, int heads) {
        row += head * head_stride + within;
#pragma unroll
        for (int t = 0; t < kTurns; t++) {
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                zero(packs[t][part]);
                if (head + t * hop < heads) load_pack<Reading::kStreaming>(packs[t][part], row + part * apart);
            }
            row += hop * head_stride;
        }
    }

    __device__ float squares(int t) const {
        float sum = 0;
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            float x[kPack];
            unpack(packs[t][part], x);
#pragma unroll
            for (int i = 0; i < kPack; i++) sum = fmaf(x[i], x[i], sum);
        }
        return sum;
    }
};

constexpr int kBlockWarps = 4;

// kWarps share a piece: 1, or all of a block.
template <typename X, int V, bool kPerHead, Pairs kPairs, int kWarps>
__device__ void rms_rope_pieces(const RmsRopeParams& p) {
    const int warp = threadIdx.x / 32;
    const int per_token = p.pieces[0] + p.pieces[1];
    const unsigned index = kWarps == 1 ? blockIdx.x * kBlockWarps + warp : blockIdx.x;
    const unsigned token_of_all = index / static_cast<unsigned>(per_token);
    int which = index - token_of_all * per_token;
    const unsigned most = static_cast<unsigned>(max(p.tokens[0], p.tokens[1]));
    const i64 batch = p.batches == 1 && token_of_all < most ? 0 : token_of_all / most;
    const i64 token = token_of_all - static_cast<unsigned>(batch) * most;
    const int part = which >= p.pieces[0];
    which -= part ? p.pieces[0] : 0;
    if (batch >= p.batches || token >= p.tokens[part]) return;  // all threads of the piece alike

    constexpr int kParts = Rotation<X, kPairs>::kParts;
    Piece<X, V, kParts, kWarps * 32> piece(kWarps == 1 ? threadIdx.x % 32 : threadIdx.x, p.d, which);
    const X* row = static_cast<const X*>(p.x[part]) + batch * p.x_batch[part] + token * p.x_token[part];
    piece.load(row, p.x_head[part], p.heads[part]);
    Rotation<X, kPairs> rotation;
    if (p.rotation != nullptr) rotation.load(p, batch, token, piece.within);

    float factor[piece.kTurns];
#pragma unroll
    for (int t = 0; t < piece.kTurns; t++) factor[t] = p.normalised ? piece.squares(t) : 1.0f;
    if (p.normalised && kPerHead) {
#pragma unroll
        for (int t = 0; t < piece.kTurns; t++) {
            for (unsigned offset = piece.lanes / 2; offset > 0; offset /= 2) {
                factor[t] += __shfl_xor_sync(0xffffffffu, factor[t], offset);
            }
            factor[t] = rsqrtf(factor[t] * (1.0f / p.d) + p.eps);  // d is a power of two
        }
    } else if (p.normalised) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < piece.kTurns; t++) sum += factor[t];
        if constexpr (kWarps == 1) {
            sum = warp_sum(sum);
        } else {
            __shared__ typename BlockSum<kWarps>::Slots slots;
            BlockSum<kWarps> block_sum(slots);
            sum = block_sum(sum);
        }
        const float scale = rsqrtf(sum / static_cast<float>(p.heads[part] * p.d) + p.eps);
#pragma unroll
        for (int t = 0; t < piece.kTurns; t++) factor[t] = scale;
    }

    // Found anew, not kept in registers over the sum.
    X* out = static_cast<X*>(p.x[part]) + batch * p.x_batch[part] + token * p.x_token[part];
    int head = piece.head;
    out += head * p.x_head[part] + piece.within;
#pragma unroll
    for (int t = 0; t < piece.kTurns; t++) {
        if (head >= p.heads[part]) break;
        const int weights = piece.within + (kPerHead ? 0 : head * p.d);
        float x[kParts][kPack];
#pragma unroll
        for (int half = 0; half < kParts; half++) {
            forget(piece.packs[t][half]);
            unpack(piece.packs[t][half], x[half]);
#pragma unroll
            for (int i = 0; i < kPack; i++) x[half][i] *= factor[t];
            if (p.weight[part] != nullptr) {
                float weight[kPack];
                load_weight<X>(p.weight[part], weights + half * piece.apart, p.weight_is_float, weight);
#pragma unroll
                for (int i = 0; i < kPack; i++) x[half][i] *= weight[i];
            }
        }
        if (p.rotation != nullptr) rotation.turn(x);
#pragma unroll
        for (int half = 0; half < kParts; half++) {
            Pack<X> result;
            pack(x[half], result);
            store_whole(out + half * piece.apart, result);
        }
        head += piece.hop;
        out += piece.hop * p.x_head[part];
    }
}

// Element by element. `lane` of `lanes` threads work on the heads [head, head_end) of one row, which share a factor.
template <typename X>
struct Span {
    X* x;
    i64 batch, token;
    int part, head, head_end, lane, lanes;

    __device__ float squares(const RmsRopeParams& p) const {
        float sum = 0;
        for (int h = head; h < head_end; h++) {
            for (int c = lane; c < p.d; c += lanes) {
                const float value = to_float(x[h * p.x_head[part] + c]);
                sum = fmaf(value, value, sum);
            }
        }
        return sum;
    }

    __device__ float normalised(const RmsRopeParams& p, int h, int c, float factor) const {
        const float value = to_float(x[h * p.x_head[part] + c]) * factor;
        if (p.weight[part] == nullptr) return value;
        return value * load_element<X>(p.weight[part], p.per_head ? c : h * p.d + c, p.weight_is_float);
    }

    __device__ void write(const RmsRopeParams& p, float factor) const {
        for (int h = head; h < head_end; h++) {
            X* to = x + h * p.x_head[part];
            if (p.rotation == nullptr) {
#pragma unroll 1
                for (int c = lane; c < p.d; c += lanes) from_float(normalised(p, h, c, factor), to[c]);
                continue;
            }
#pragma unroll 1
            for (int pair = lane; pair < p.d / 2; pair += lanes) {
                const int c0 = p.interleaved ? 2 * pair : pair, c1 = p.interleaved ? c0 + 1 : pair + p.d / 2;
                const i64 at =
                    batch * p.rotation_batch + token * p.rotation_token + pair * (p.sines == nullptr ? 4 : 1);
                float m00 = load_element<X>(p.rotation, at, p.rotation_is_float), m01, m10, m11;
                if (p.sines == nullptr) {
                    m01 = load_element<X>(p.rotation, at + 1, p.rotation_is_float);
                    m10 = load_element<X>(p.rotation, at + 2, p.rotation_is_float);
                    m11 = load_element<X>(p.rotation, at + 3, p.rotation_is_float);
                } else {
                    m10 = load_element<X>(p.sines, batch * p.sines_batch + token * p.sines_token + pair,
                                          p.rotation_is_float);
                    m01 = -m10, m11 = m00;
                }
                // Both are read before either is written over.
                const float x0 = normalised(p, h, c0, factor), x1 = normalised(p, h, c1, factor);
                from_float(fmaf(m00, x0, m01 * x1), to[c0]);
                from_float(fmaf(m11, x1, m10 * x0), to[c1]);
            }
        }
    }
};

// A mean over a head: a warp per head. Over the token, or none: the block takes all heads.
template <typename X>
__device__ inline void rms_rope_token(const RmsRopeParams& p, i64 batch, i64 token, int part, BlockSum<8>& block_sum) {
    const int thread = threadIdx.x, step = p.per_head ? blockDim.x / 32 : 1;
    Span<X> row;
    row.x = static_cast<X*>(p.x[part]) + batch * p.x_batch[part] + token * p.x_token[part];
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

template <typename X>
__device__ inline void rms_rope_tokens(const RmsRopeParams& p) {
    __shared__ BlockSum<8>::Slots slots;
    BlockSum<8> block_sum(slots);
    const i64 most = max(p.tokens[0], p.tokens[1]);
    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y) {
        for (i64 token = blockIdx.x; token < most; token += gridDim.x) {
#pragma unroll 1
            for (int part = 0; part < 2; part++) {
                if (token < p.tokens[part]) rms_rope_token<X>(p, batch, token, part, block_sum);
            }
        }
    }
}

// Four blocks: to fit a fifth into a multiprocessor the compiler would spill.
#define RMS_ROPE_ANY(NAME, X)                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 4) NAME(const __grid_constant__ RmsRopeParams p) { \
        rms_rope_tokens<X>(p);                                                                           \
    }
RMS_ROPE_ANY(rms_rope_any, __half)
RMS_ROPE_ANY(rms_rope_bf16_any, __nv_bfloat16)

#define RMS_ROPE_OF(NAME, X, V, PER_HEAD, PAIRS, WARPS, BLOCKS)            \
    extern "C" __global__ void __launch_bounds__(kBlockWarps * 32, BLOCKS) \
        rms_rope_##NAME##_##V(const __grid_constant__ RmsRopeParams p) {   \
        rms_rope_pieces<X, V, PER_HEAD, PAIRS, WARPS>(p);                  \
    }
#define RMS_ROPE(NAME, V, PER_HEAD, PAIRS, WARPS, BLOCKS) RMS_ROPE_OF(NAME, __half, V, PER_HEAD, PAIRS, WARPS, BLOCKS)
#define RMS_ROPE_BF16(NAME, V, PER_HEAD, PAIRS, WARPS, BLOCKS) \
    RMS_ROPE_OF(bf16_##NAME, __nv_bfloat16, V, PER_HEAD, PAIRS, WARPS, BLOCKS)
// Names say over what the mean is taken, how pairs lie unless they are neighbours, who holds a piece, and packs per
// thread (PIECES in ops/norm/rms_rope.py). The last number: blocks that are to fit a multiprocessor, the more the fewer
// registers.
RMS_ROPE(token_warp, 2, false, kNeighbours, 1, 6)
RMS_ROPE(token_warp, 6, false, kNeighbours, 1, 5)
RMS_ROPE(token_warp, 8, false, kNeighbours, 1, 4)
RMS_ROPE(token_warp, 12, false, kNeighbours, 1, 4)
RMS_ROPE(token_warp, 16, false, kNeighbours, 1, 3)
RMS_ROPE(token_warp, 20, false, kNeighbours, 1, 3)
RMS_ROPE(token_block, 2, false, kNeighbours, kBlockWarps, 6)
RMS_ROPE(token_block, 5, false, kNeighbours, kBlockWarps, 6)
RMS_ROPE(token_block, 16, false, kNeighbours, kBlockWarps, 3)
RMS_ROPE(token_halves_block, 16, false, kHalves, kBlockWarps, 3)
RMS_ROPE(head_warp, 2, true, kNeighbours, 1, 8)
RMS_ROPE(head_warp, 4, true, kNeighbours, 1, 6)
RMS_ROPE(head_warp, 6, true, kNeighbours, 1, 5)
RMS_ROPE(head_warp, 8, true, kNeighbours, 1, 4)
RMS_ROPE(head_halves_warp, 4, true, kHalves, 1, 4)
RMS_ROPE(head_sines_warp, 2, true, kSines, 1, 7)
RMS_ROPE(head_sines_warp, 4, true, kSines, 1, 6)
RMS_ROPE(head_sines_warp, 8, true, kSines, 1, 5)
RMS_ROPE_BF16(token_warp, 8, false, kNeighbours, 1, 4)
RMS_ROPE_BF16(token_block, 5, false, kNeighbours, kBlockWarps, 6)
RMS_ROPE_BF16(head_warp, 4, true, kNeighbours, 1, 6)
RMS_ROPE_BF16(head_halves_warp, 4, true, kHalves, 1, 4)
RMS_ROPE_BF16(head_sines_warp, 4, true, kSines, 1, 6)
