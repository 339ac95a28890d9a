// The product of a block of conv: kImageRows x 16 pixels by kColumns channels of the result.
#pragma once

#include "conv_params.cuh"
#include "conv_patch.cuh"
#include "half_sums.cuh"
#include "keep_order.cuh"

// kTapRows x kTapColumns taps of an image; the block is kWarpsDown x kWarpsAcross warps, and a warp's part kTall image
// rows of 16 pixels by kGroups x 16 channels. kBordered: see PatchCopy.
template <int kTapRows, int kTapColumns, int kStride, int kWarpsDown, int kWarpsAcross, int kTall, int kGroups,
          bool kBordered = false>
struct Conv {
    static constexpr int kTaps = kTapRows * kTapColumns;
    static constexpr int kThreads = kWarpsDown * kWarpsAcross * 32;
    static constexpr int kImageRows = kWarpsDown * kTall;
    static constexpr int kWarpColumns = kGroups * 16, kColumns = kWarpsAcross * kWarpColumns;
    static constexpr bool kPhased = kTapRows == 2;  // an upsampling: blockIdx.z is the phase

    using Shape = Patch<kTapRows, kTapColumns, kStride, kImageRows>;
    using Copy = PatchCopy<Shape, kThreads, kBordered>;
    using Tile = SwizzledTile<kStepK>;

    // Tiles of weights in flight. Where a patch serves one tap, patches keep step with them; else the next patch comes
    // in parts, one with each tap of this one.
    static constexpr int kSlots = kHasAsyncCopy ? 4 : 2, kPatches = kTaps == 1 ? kSlots : 2;
    static constexpr int kAhead = kHasAsyncCopy ? kSlots - 1 : 2;
    static constexpr int kParts = kTaps == 1 ? 1 : kHasAsyncCopy ? kTaps - 2 : kTaps - 1;
    static constexpr int kPart = (Copy::kSteps + kParts - 1) / kParts;
    static constexpr int kTileBytes = kColumns * Tile::kRowBytes, kTiles = kPatches * Shape::kBytes;
    static constexpr int kBytes = kTiles + kSlots * kTileBytes;
    static_assert(kBytes <= (kHasAsyncCopy ? 99 : 64) * 1024, "a block has room on every card of its class");

    static constexpr int kDownAtOnce = kThreads / 4;  // rows of weights that the block's lanes bring at a time
    static constexpr int kDown = (kColumns + kDownAtOnce - 1) / kDownAtOnce;

    // `fast`: blocks of 16 pixels whose half sums run side by side, so that no product waits for the one before it.
    static constexpr int kBeside = kHasAsyncCopy && kTall % 4 == 0 ? 2 : 1;
    static constexpr int kTurns = kTall / kBeside;
    using Parts = unsigned[2][kBeside][2];
    using Sums = float[kGroups][2][kTall][4];

    const ConvParams& p;
    const unsigned shared;

    __device__ static int warp_row() { return thread_again() / 32 / kWarpsAcross * kTall; }
    __device__ static int warp_column() { return thread_again() / 32 % kWarpsAcross * kWarpColumns; }

    // The block's first pixel (x, y) of out and first column. Blocks of the same pixels run together. Found anew where
    // it is wanted, not kept in registers.
    __device__ int3 corner() const {
        int number;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
        const int column_tiles = (p.n + kColumns - 1) / kColumns,
                  across = (p.out_width + kPatchPixels - 1) / kPatchPixels;
        const int patch = number / column_tiles;
        return make_int3(patch % across * kPatchPixels, patch / across * kImageRows, number % column_tiles * kColumns);
    }
    __device__ static int phase() { return kPhased ? blockIdx.z : 0; }

    // A place in the sum over k: a tap of time, 32 channels, and of these a tap of the image.
    struct Cursor {
        int time, channel, tap;

        __device__ void next_patch(const ConvParams& p) {
            channel += kStepK;
            if (channel >= p.channels) channel = 0, time++;
        }
        __device__ void next_tile(const ConvParams& p) {
            if (++tap == kTaps) tap = 0, next_patch(p);
        }
    };

    struct Walk {
        const ConvParams& p;
        const unsigned shared;
        Cursor weights, patches;      // of the last tile fetched, of the next patch to be fetched
        const __half* weight_row;     // of this lane's first row and column
        int weight_rows;              // that exist from there on
        int2 origin;                  // the input pixel of the patch's corner
        unsigned before, slot, next;  // tiles of weights: the last, this and the next one
        unsigned patch_before, patch, patch_next;
        int tap = 0;                                  // of the tile being multiplied
        unsigned row, row_next, turned, turned_next;  // of the patch: this tap's and the next row, and their twist
        unsigned a_lane[kTapColumns], b_lane;
        uint4 held_weights[kHasAsyncCopy ? 1 : kDown], held_patch[kHasAsyncCopy ? 1 : kPart];

        __device__ Walk(const Conv& of) : p(of.p), shared(of.shared) {
            const int3 corner = of.corner();
            const int lane = lane_again(), phase = Conv::phase();
            weights = patches = Cursor{first_time(), 0, 0};
            weight_row =
                p.weight + (i64(phase) * p.n + corner.z + thread_again() / 4) * row_length() + thread_again() % 4 * 8;
            weight_rows = p.n - corner.z - thread_again() / 4;
            origin = make_int2(corner.x * kStride - p.left, corner.y * kStride - p.top);
            if (kPhased) origin.x += phase % 2, origin.y += phase / 2;
            before = shared + kTiles + (kSlots - 1) * kTileBytes, slot = shared + kTiles, next = slot + kTileBytes;
            patch_before = shared + (kPatches - 1) * Shape::kBytes, patch = shared, patch_next = shared + Shape::kBytes;
#pragma unroll
            for (int i = 0; i < kTapColumns; i++) {
                a_lane[i] = Shape::lane(lane, i) + warp_row() * kStride * Shape::kRowBytes;
            }
            b_lane = warp_column() * Tile::kRowBytes + Tile::lane_of_rows(lane);
            row = patch, turned = 0;
            find_next_row(0);
        }

        __device__ int row_length() const { return p.time_taps * kTaps * p.channels; }
        __device__ int frame() const { return blockIdx.y % p.frames * p.time_step - p.before; }
        // Frames before the cached ones are zeros: their taps are left out.
        __device__ int first_time() const { return max(0, -p.cached - frame()); }
        __device__ int steps() const { return (p.time_taps - first_time()) * ((p.channels + kStepK - 1) / kStepK); }

        __device__ Frame source(const Cursor& at) const {
            const int number = frame() + at.time;
            const i64 batch = blockIdx.y / p.frames;
            if (number >= 0) {
                return Frame{p.x + batch * p.x_batch + number * p.x_frame + at.channel, p.x_row, p.x_pixel};
            }
            return Frame{p.cache + batch * p.cache_batch + (p.cached + number) * p.cache_frame + at.channel,
                         p.cache_row, p.cache_pixel};
        }

        __device__ void fetch_weights(unsigned to) {
            to += Tile::offset(thread_again() / 4, thread_again() % 4);
            const bool wanted = weights.time < p.time_taps && weights.channel + thread_again() % 4 * 8 < p.channels;
            const __half* from = weight_row + (weights.time * kTaps + weights.tap) * p.channels + weights.channel;
#pragma unroll
            for (int i = 0; i < kDown; i++) {
                if (!has_row(i)) continue;
                const bool exists = wanted && i * kDownAtOnce < weight_rows;
                const __half* row = from + i64(row_length()) * (i * kDownAtOnce);
#if __CUDA_ARCH__ >= 800
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + i * kDownAtOnce *
                                                                                                     Tile::kRowBytes),
                             "l"(row), "r"(exists ? 16 : 0)
                             : "memory");
#else
                Copy::load_if(held_weights[i], row, exists);
#endif
            }
        }

        __device__ void store_weights(unsigned to) {
#if __CUDA_ARCH__ < 800
            to += Tile::offset(thread_again() / 4, thread_again() % 4);
#pragma unroll
            for (int i = 0; i < kDown; i++) {
                if (has_row(i)) Copy::put(to + i * kDownAtOnce * Tile::kRowBytes, held_weights[i]);
            }
#endif
        }
        __device__ static bool has_row(int i) {
            return (i + 1) * kDownAtOnce <= kColumns || thread_again() / 4 + i * kDownAtOnce < kColumns;
        }

        __device__ void fetch_part(unsigned to, int part) {
            if (patches.time >= p.time_taps) return;
            Copy::template fetch<kPart>(held_patch, to, source(patches), origin, p.height, p.width,
                                        p.channels - patches.channel, p.border, part);
        }
        __device__ void store_part(unsigned to, int part) { Copy::template store<kPart>(held_patch, to, part); }

        // The first tiles and patches, as far as they are fetched ahead.
        __device__ void begin() {
            constexpr int kFirst = kHasAsyncCopy ? kAhead : 1;
#pragma unroll 1
            for (int i = 0; i < kFirst; i++) {
                if (i > 0) weights.next_tile(p);
                fetch_weights(slot + i * kTileBytes), store_weights(slot);
                if (kTaps == 1 || i == 0) {
#pragma unroll 1
                    for (int part = 0; part < kParts; part++) {
                        fetch_part(patch + i * Shape::kBytes, part), store_part(patch, part);
                    }
                    patches.next_patch(p);
                }
                commit_copies();
            }
            if (!kHasAsyncCopy) {
                weights.next_tile(p), fetch_weights(next);
                if (kTaps == 1) fetch_part(patch_next, 0), patches.next_patch(p);
            }
            await_copies<kHasAsyncCopy ? kAhead - 1 : 0>();
            __syncthreads();
        }

        // From here on the next tile, and behind the last tap the next patch, may be read; and what was read before
        // this tile, or with two slots what was read of it so far, may be overwritten.
        __device__ void pass() {
            store_weights(next);
            if (kTaps == 1) store_part(patch_next, 0);
            if (kTaps > 1 && tap > 0) store_part(patch_next, tap - 1);
            await_copies<kHasAsyncCopy ? kAhead - 2 : 0>();
            __syncthreads();
            weights.next_tile(p), fetch_weights(before);
            fetch_part(kTaps == 1 ? patch_before : patch_next, kTaps == 1 ? 0 : tap);
            if (tap == kTaps - 1) patches.next_patch(p);
            commit_copies();
        }

        __device__ void next_tile() {
            before = slot, slot = next;
            next = next == shared + kTiles + (kSlots - 1) * kTileBytes ? shared + kTiles : next + kTileBytes;
            tap = tap == kTaps - 1 ? 0 : tap + 1;
        }
        __device__ void next_row(int tap_row) {
            row = row_next, turned = turned_next;
            if (tap_row == kTapRows - 1) {
                patch_before = patch, patch = patch_next;
                patch_next =
                    patch_next == shared + (kPatches - 1) * Shape::kBytes ? shared : patch_next + Shape::kBytes;
            }
            find_next_row(tap_row == kTapRows - 1 ? 0 : tap_row + 1);
        }
        __device__ void find_next_row(int tap_row) {
            const bool last = tap_row == kTapRows - 1;
            row_next = last ? patch_next : row + Shape::kRowBytes;
            turned_next = last ? 0 : turned ^ Shape::twist(0, 1);
        }

        // Of the tap in this column, or, past the last column, of the first in the next row.
        __device__ void load_a(unsigned (&a)[4], int column, int k, int m) const {
            const bool ahead = column == kTapColumns;
            const unsigned lane = a_lane[ahead ? 0 : column] ^ Shape::twist(k, m * kStride);
            load_matrices(
                a, (ahead ? row_next + (lane ^ turned_next) : row + (lane ^ turned)) + m * kStride * Shape::kRowBytes);
        }
        __device__ void load_b(unsigned (&b)[4], bool of_next, int k, int group) const {
            load_matrices(b, Tile::at((of_next ? next : slot) + b_lane, k, group));
        }
    };

    // sums = the block's part of the convolution.
    template <bool kFast>
    __device__ void multiply_all(Sums& sums) const {
#pragma unroll
        for (int i = 0; i < kGroups * 8 * kTall; i++) sums[i / 8 / kTall][i / 4 / kTall % 2][i / 4 % kTall][i % 4] = 0;
        Walk walk(*this);
        walk.begin();
        if constexpr (kFast) {
            all_fast(sums, walk);
        } else {
            all_precise(sums, walk);
        }
        await_copies<0>();
        __syncthreads();  // the tiles' memory is free
    }

    // Fragments are asked for a step, or a k-step, before their use. A step: 16 columns, one k-step.
    __device__ void all_precise(Sums& sums, Walk& walk) const {
        // The step before which the next tile must be there. With two slots it is the last, when this tile has been
        // read to its end; with more, the next tile's fragments are read in the second half of this one.
        constexpr int kSteps = 2 * kGroups, kPass = kHasAsyncCopy ? kGroups : kSteps - 1;
        unsigned a[2][kTall][4], b[2][4];
#pragma unroll
        for (int m = 0; m < kTall; m++) walk.load_a(a[0][m], 0, 0, m);
        walk.load_b(b[0], false, 0, 0);
        int tap_row = 0;
        for (int left = walk.steps() * kTapRows; left > 0; left--) {
#pragma unroll
            for (int column = 0; column < kTapColumns; column++) {
#pragma unroll
                for (int step = 0; step < kSteps; step++) {
                    if (step == kPass) walk.pass();
                    const int after = (step + 1) % kSteps;
                    walk.load_b(b[after % 2], after == 0, after / kGroups, after % kGroups);
#pragma unroll
                    for (int m = 0; m < kTall; m++) {
                        const int turn = m * kGroups / kTall;
                        if (step == turn) walk.load_a(a[1][m], column, 1, m);
                        if (step == (kHasAsyncCopy ? kGroups + turn : kSteps - 1))
                            walk.load_a(a[0][m], column + 1, 0, m);
                    }
                    multiply(sums[step % kGroups][0], sums[step % kGroups][1], a[step / kGroups], b[step % 2]);
                }
                walk.next_tile();
            }
            walk.next_row(tap_row);
            tap_row = tap_row == kTapRows - 1 ? 0 : tap_row + 1;
        }
    }

    // 16 columns after the other, and of these 16 or 32 pixels after the other: both k-steps of the tile in half sums,
    // which are added to the float ones while the next are multiplied.
    __device__ void all_fast(Sums& sums, Walk& walk) const {
        constexpr int kAll = kGroups * kTurns;
        static_assert(kAll % 2 == 0, "the half sums take turns");
        unsigned a[2][kTall][4], b[2][2][4];
        Parts part[2];
        clear(part[1]);
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int m = 0; m < kTall; m++) walk.load_a(a[k][m], 0, k, m);
            walk.load_b(b[0][k], false, k, 0);
        }
        int tap_row = 0;
        for (int left = walk.steps() * kTapRows; left > 0; left--) {
#pragma unroll
            for (int column = 0; column < kTapColumns; column++) {
#pragma unroll
                for (int turn = 0; turn < kAll; turn++) {
                    const int group = turn / kTurns, m = turn % kTurns * kBeside;
                    if (turn % 2 == 0) keep_order(p.channels, column * kAll + turn);
                    // The last columns' fragments are in registers: the tile has been read.
                    if (turn == (kGroups - 1) * kTurns) walk.pass();
                    const int held = (column * kGroups + group) % 2;
                    if (m == 0) {
                        const int after = (group + 1) % kGroups;
#pragma unroll
                        for (int k = 0; k < 2; k++) walk.load_b(b[1 - held][k], after == 0, k, after);
                    }
                    Parts& now = part[turn % 2];
                    clear(now);
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        multiply(now[0], now[1], reinterpret_cast<const unsigned (&)[kBeside][4]>(a[k][m]), b[held][k]);
                    }
                    const int last = (turn + kAll - 1) % kAll;
                    fold(sums[last / kTurns], last % kTurns * kBeside, part[(turn + 1) % 2]);
                    if (group == kGroups - 1) {
#pragma unroll
                        for (int i = 0; i < 2 * kBeside; i++) {
                            walk.load_a(a[i % 2][m + i / 2], column + 1, i % 2, m + i / 2);
                        }
                    }
                }
                walk.next_tile();
            }
            if (kTapColumns * kGroups % 2) {  // an odd number of turns: what is held last is wanted first
#pragma unroll
                for (int i = 0; i < 8; i++) b[0][i / 4][i % 4] = b[1][i / 4][i % 4];
            }
            walk.next_row(tap_row);
            tap_row = tap_row == kTapRows - 1 ? 0 : tap_row + 1;
        }
        fold(sums[kGroups - 1], kTall - kBeside, part[1]);
    }

    __device__ static void clear(Parts& part) {
#pragma unroll
        for (int i = 0; i < 4 * kBeside; i++) part[i / 2 / kBeside][i / 2 % kBeside][i % 2] = 0;
    }
};
