// The product of a block: kRowWarps x kColumnWarps warps, each with 64 x 64 of it in registers.
#pragma once

#include "keep_order.cuh"
#include "linear_params.cuh"
#include "linear_tiles.cuh"

constexpr int kWarpTile = 64;
constexpr int kGroups = kWarpTile / 16;  // of 16 columns: what one ldmatrix brings of the weight

// Sums of a warp's tile: [16 columns][8 columns][16 rows][fragment].
using Sums = float[kGroups][2][4][4];

template <int kRowWarps, int kColumnWarps, bool kPaired>
struct Product {
    static constexpr int kThreads = kRowWarps * kColumnWarps * 32;
    static constexpr int kRows = kRowWarps * kWarpTile, kColumns = kColumnWarps * kWarpTile;
    // Tiles in flight. Two of sm_75's blocks of four warps, or one of eight, share 64 KB; later cards have at least
    // 100.
    static constexpr int kStages = !kHasAsyncCopy ? 2 : kThreads == 128 ? 3 : 4;
    using Tile = SwizzledTile<kStepK>;
    static constexpr int kRowTile = kRows * Tile::kRowBytes, kStage = (kRows + kColumns) * Tile::kRowBytes;
    using RowOperand = Operand<kRows, kThreads, false>;
    using ColumnOperand = Operand<kColumns, kThreads, kPaired>;
    // `fast`: blocks of 16 rows whose half sums run side by side, so that no product waits for the one before it.
    static constexpr int kBeside = kHasAsyncCopy ? 2 : 1;
    using Parts = unsigned[2][kBeside][2];

    static constexpr int kOutColumns = kPaired ? kColumns / 2 : kColumns;
    static constexpr int kRowTilesTogether = 8;

    const LinearParams& p;
    const unsigned shared;

    __device__ static int warp_row() { return thread_again() / 32 / kColumnWarps * kWarpTile; }
    __device__ static int warp_column() { return thread_again() / 32 % kColumnWarps * kWarpTile; }

    // The block's first row and first column of out. Blocks that run at the same time stand in a rectangle of eight row
    // tiles, so that they find each other's operands in L2. Found anew where it is wanted, not kept in registers.
    __device__ int2 place() const {
        int number;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
        const int row_tiles = (p.m + kRows - 1) / kRows, column_tiles = (p.n + kOutColumns - 1) / kOutColumns;
        const int before = number / (kRowTilesTogether * column_tiles) * kRowTilesTogether;
        const int within = number - before * column_tiles, height = min(kRowTilesTogether, row_tiles - before);
        return make_int2((before + within % height) * kRows, within / height * kOutColumns);
    }

    // What moves through the tiles of k.
    struct Walk {
        const LinearParams& p;
        const unsigned shared;
        RowOperand rows;
        ColumnOperand columns;
        unsigned slot, next, ahead;  // of the tile being multiplied, of the one after it, of the one to be fetched
        unsigned a_lane, b_lane;

        __device__ Walk(const Product& of, int2 at)
            : p(of.p),
              shared(of.shared),
              rows(p.x + blockIdx.y * p.x_batch, nullptr, at.x, p.m - at.x, p.x_row),
              columns(p.weight, p.up, at.y, p.n - at.y, p.weight_row) {
            const int lane = lane_again();
            a_lane = warp_row() * Tile::kRowBytes + Tile::lane_of_k(lane);
            b_lane = kRowTile + warp_column() * Tile::kRowBytes + Tile::lane_of_rows(lane);
            slot = shared, next = shared + kStage, ahead = shared + (kStages - 1) * kStage;
        }

        __device__ void fetch_rows(unsigned to, int tile) { rows.fetch(to, p.x_row, tile * kStepK, p.k); }
        __device__ void fetch_columns(unsigned to, int tile) {
            columns.fetch(to + kRowTile, p.weight_row, tile * kStepK, p.k);
        }

        // Without asynchronous copies and with few registers: the next tile in parts, each fetched and stored at its
        // turn.
        __device__ void bring(int turn, int turns, int tile) {
            constexpr int kParts = 1 + (ColumnOperand::kDown + 3) / 4;
            const int length = turns * 3 / 4 / kParts;
            if (turn % length != 0 || turn > kParts * length) return;
            const int part = turn / length;
            if (part == 1) rows.store(next);
            if (part > 1) columns.store(next + kRowTile, part * 4 - 8, part * 4 - 4);
            if (part == 0) fetch_rows(next, tile);
            if (part > 0 && part < kParts)
                columns.fetch(next + kRowTile, p.weight_row, tile * kStepK, p.k, part * 4 - 4, part * 4);
        }

        __device__ void begin() {
            if constexpr (kHasAsyncCopy) {
#pragma unroll
                for (int i = 0; i < kStages - 1; i++) {
                    fetch_rows(shared + i * kStage, i), fetch_columns(shared + i * kStage, i);
                    commit_copies();
                }
                await_copies<kStages - 2>();
            } else {
                fetch_rows(shared, 0), fetch_columns(shared, 0);
                rows.store(shared), columns.store(shared + kRowTile);
            }
            __syncthreads();
        }

        // From here on the next tile may be read, and what was read before may be overwritten.
        // free: the slot that nobody reads any more once this tile has been multiplied as far as it was.
        __device__ void pass(int tile, unsigned free) {
            await_copies<kHasAsyncCopy ? kStages - 3 : 0>();
            __syncthreads();
            if constexpr (kHasAsyncCopy) {
                fetch_rows(ahead, tile + kStages - 1), fetch_columns(ahead, tile + kStages - 1);
                commit_copies();
                ahead = free;
            }
        }

        __device__ void advance() {
            slot = next;
            next = next == shared + (kStages - 1) * kStage ? shared : next + kStage;
        }

        __device__ void load_a(unsigned (&a)[4], unsigned from, int k, int m) const {
            load_matrices(a, Tile::at(from + a_lane, k, m));
        }
        __device__ void load_b(unsigned (&b)[4], unsigned from, int k, int group) const {
            load_matrices(b, Tile::at(from + b_lane, k, group));
        }
    };

    // sums = x * weight^T for the block's tile.
    template <bool kFast>
    __device__ void multiply_tiles(Sums& sums) const {
#pragma unroll
        for (int i = 0; i < kGroups * 32; i++) sums[i / 32][i / 16 % 2][i / 4 % 4][i % 4] = 0;
        Walk walk(*this, place());
        walk.begin();
        const int tiles = (p.k + kStepK - 1) / kStepK;
        if constexpr (kFast) {
            multiply_fast(sums, walk, tiles);
        } else {
            multiply_precise(sums, walk, tiles);
        }
        await_copies<0>();
        __syncthreads();  // the tiles' memory is free
    }

    // Eight steps for a tile: 16 columns, one k-step each. Fragments are asked for a step, or four, before their use.
    __device__ void multiply_precise(Sums& sums, Walk& walk, int tiles) const {
        // The step before which the next tile must be there. With two tiles it is the last, when this one has been read
        // to its end; with more, the next tile's rows are read in the second half of this one.
        constexpr int kSteps = 2 * kGroups, kPass = kHasAsyncCopy ? kGroups : kSteps - 1;
        unsigned a[2][4][4], b[2][4];
#pragma unroll
        for (int m = 0; m < 4; m++) walk.load_a(a[0][m], walk.slot, 0, m);
        walk.load_b(b[0], walk.slot, 0, 0);
        for (int tile = 0; tile < tiles; tile++) {
#pragma unroll
            for (int step = 0; step < kSteps; step++) {
                if constexpr (!kHasAsyncCopy) {
                    if (step == 0) walk.fetch_rows(walk.next, tile + 1), walk.fetch_columns(walk.next, tile + 1);
                    if (step == kPass - 1) walk.rows.store(walk.next), walk.columns.store(walk.next + kRowTile);
                }
                if (step == kPass) walk.pass(tile, walk.slot);
                const int after = (step + 1) % kSteps;
                walk.load_b(b[after % 2], after > 0 ? walk.slot : walk.next, after / kGroups, after % kGroups);
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    if (step == m) walk.load_a(a[1][m], walk.slot, 1, m);
                    if (step == (kHasAsyncCopy ? kGroups + m : kSteps - 1)) walk.load_a(a[0][m], walk.next, 0, m);
                }
                multiply(sums[step % kGroups][0], sums[step % kGroups][1], a[step / kGroups], b[step % 2]);
            }
            walk.advance();
        }
    }

    // 16 columns after the other, and of these 16 or 32 rows after the other: both k-steps of the tile in half sums,
    // which are added to the float ones while the next are multiplied.
    __device__ void multiply_fast(Sums& sums, Walk& walk, int tiles) const {
        constexpr int kTurns = 4 / kBeside;
        unsigned a[2][4][4], b[2][2][4];
        Parts part[2];
#pragma unroll
        for (int i = 0; i < 4 * kBeside; i++) part[1][i / 2 / kBeside][i / 2 % kBeside][i % 2] = 0;
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int m = 0; m < 4; m++) walk.load_a(a[k][m], walk.slot, k, m);
            walk.load_b(b[0][k], walk.slot, k, 0);
        }
        for (int tile = 0; tile < tiles; tile++) {
#pragma unroll
            for (int turn = 0; turn < kGroups * kTurns; turn++) {
                const int group = turn / kTurns, m = turn % kTurns * kBeside;
                if (turn % 2 == 0) keep_order(p.k, turn);
                if constexpr (!kHasAsyncCopy) walk.bring(turn, kGroups * kTurns, tile + 1);
                // The last columns' fragments are in registers: the tile has been read.
                if (turn == (kGroups - 1) * kTurns) walk.pass(tile, walk.slot);
                if (m == 0) {
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        walk.load_b(b[(group + 1) % 2][k], group + 1 < kGroups ? walk.slot : walk.next, k,
                                    (group + 1) % kGroups);
                    }
                }
                Parts& now = part[turn % 2];
#pragma unroll
                for (int i = 0; i < 4 * kBeside; i++) now[i / 2 / kBeside][i / 2 % kBeside][i % 2] = 0;
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    multiply(now[0], now[1], reinterpret_cast<const unsigned (&)[kBeside][4]>(a[k][m]),
                             b[group % 2][k]);
                }
                const int before = (turn + kGroups * kTurns - 1) % (kGroups * kTurns);
                fold(sums[before / kTurns], before % kTurns * kBeside, part[(turn + 1) % 2]);
                if (group == kGroups - 1) {
#pragma unroll
                    for (int i = 0; i < 2 * kBeside; i++) walk.load_a(a[i % 2][m + i / 2], walk.next, i % 2, m + i / 2);
                }
            }
            walk.advance();
        }
        fold(sums[kGroups - 1], 4 - kBeside, part[1]);
    }

    __device__ static void fold(float (&sums)[2][4][4], int m, const Parts& part) {
#pragma unroll
        for (int i = 0; i < 4 * kBeside; i++) {
            const float2 pair = floats_of(part[i / 2 % 2][i / 4][i % 2]);
            sums[i / 2 % 2][m + i / 4][i % 2 * 2] += pair.x;
            sums[i / 2 % 2][m + i / 4][i % 2 * 2 + 1] += pair.y;
        }
    }

    // A half sum that overflowed is infinite, and then so is the float one it was added to, or NaN, for ever.
    __device__ static bool any_lost(const Sums& sums) {
        float zero = 0;
#pragma unroll
        for (int i = 0; i < kGroups * 32; i++) zero = fmaf(sums[i / 32][i / 16 % 2][i / 4 % 4][i % 4], 0.0f, zero);
        return __syncthreads_or(!(zero == 0.0f));
    }
};
