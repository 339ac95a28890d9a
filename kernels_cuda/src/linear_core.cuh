// The product of a block: kRowWarps x kColumnWarps warps, each with 16 kBands x 64 of it in registers.
//
// Precise: a warp goes down its bands of 16 rows, a step for each, with the weight's fragments of a k-step in registers
// and the bands' streaming by. A step is 16 rows x 64 columns x 16 of k: 8 mma.m16n8k16 or 16 mma.m16n8k8.
// Fast: 16 columns after the other, with the fragments of 32 of k in registers: a step is 32 (sm_75: 16) rows of these.
//
// A tile of k is read to its end, as far as the next steps need it, before the last steps of it are multiplied. There
// stands the one barrier of the tile: behind it the next tile is read, and this one's memory is free for the tile
// kStages further on. What brings that one stands between the products of the steps behind the barrier: early, because
// an answer from L2 takes about a thousand cycles where all multiprocessors ask.
#pragma once

#include "dot4.cuh"
#include "half_sums.cuh"
#include "keep_order.cuh"
#include "linear_params.cuh"
#include "linear_tiles.cuh"

constexpr int kWarpTile = 64;            // columns of a warp's tile, and rows where it has four bands
constexpr int kGroups = kWarpTile / 16;  // of 16 columns: what one ldmatrix brings of the weight

// Sums of a warp's tile: [16 columns][8 columns][16 rows][fragment]. Of halves they are floats, of 8-bit integers ints,
// of 4-bit ones Int4Sums: two or four of these lie where a half would, so all that only moves operands is the same.
template <int kBands, typename Sum = float>
using SumsOf = Sum[kGroups][2][kBands][4];
using Sums = SumsOf<4>;

// Tiles of k in shared memory: how wide, how many.
template <int kThreads, int kBands>
struct Depth {
#if __CUDA_ARCH__ < 800
    // Two of sm_75's blocks of four warps, or one of eight, share 64 KB.
    static constexpr int kAcross = kStepK, kStages = 2;
#elif __CUDA_ARCH__ == 900
    // 227 KB for all blocks together.
    static constexpr int kAcross = 2 * kStepK, kStages = kThreads == 128 && kBands == 6 ? 2 : kThreads == 64 ? 2 : 3;
#else
    // A block has 99 KB at most, and so have all blocks together.
    static constexpr int kAcross = kStepK, kStages = kThreads == 256                             ? (kBands == 4 ? 4 : 3)
                                                     : kThreads * kBands > 512 || kThreads == 64 ? 2
                                                                                                 : 3;
#endif
};

template <int kRowWarps, int kColumnWarps, bool kPaired, int kBands = 4, typename Sum = float>
struct Product {
    static constexpr int kThreads = kRowWarps * kColumnWarps * 32;
    static constexpr int kWarpRows = 16 * kBands;
    static constexpr int kRows = kRowWarps * kWarpRows, kColumns = kColumnWarps * kWarpTile;
    using Tiles = Depth<kThreads, kBands>;
    static constexpr int kStages = Tiles::kStages, kAcross = Tiles::kAcross, kSteps = kAcross / 16;
    using Tile = SwizzledTile<kAcross>;
    static constexpr int kRowTile = kRows * Tile::kRowBytes, kStage = (kRows + kColumns) * Tile::kRowBytes;
    using RowOperand = Operand<kRows, kThreads, false, kAcross>;
    using ColumnOperand = Operand<kColumns, kThreads, kPaired, kAcross>;
    static constexpr int kPieces =
        RowOperand::kDown + ColumnOperand::kDown;  // of 16 bytes that a lane brings of a tile

    using Sums = SumsOf<kBands, Sum>;
    static constexpr bool kIntegers = kIsInteger<Sum>;
    // `fast`: bands whose half sums run side by side, so that no product waits for the one before it.
    static constexpr int kBeside = kHasAsyncCopy ? 2 : 1;
    using Parts = unsigned[2][kBeside][2];

    // Integers of sm_75: products take half as long, and the memory pipe is as busy as the tensor cores. A block of
    // eight warps stores and asks for a piece at a time, in the middle of a step, as two blocks would take turns.
    static constexpr bool kShort = kIntegers && !kHasAsyncCopy && kBands == 4,
                          kPieceByPiece = kShort && kThreads == 256;

    // Steps from a band's ldmatrix to its products, and steps that the assembler may mix: as measured, or (kShort) as
    // predicted from the machine code.
    static constexpr int kAhead = kShort && !kPieceByPiece                          ? 3
                                  : kHasAsyncCopy && kBands == 6 && kThreads == 128 ? 2
                                                                                    : 1;
    static constexpr int kOrdered = kShort            ? (kPieceByPiece ? 1 : 8)
                                    : !kHasAsyncCopy  ? (kBands == 4 ? 4 : 1)
                                    : kBands == 6     ? (kThreads == 256 ? 6 : 2)
                                    : kThreads == 256 ? 2
                                                      : 8;

    static constexpr int kOutColumns = kPaired ? kColumns / 2 : kColumns;
    static constexpr int kRowTilesTogether = 8;

    const LinearParams& p;
    const unsigned shared;

    __device__ static int warp_row() { return thread_again() / 32 / kColumnWarps * kWarpRows; }
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

    // What moves through the tiles of k. kPass: the step that has a tile's barrier before it. kParts: without
    // asynchronous copies a tile passes through registers, whole where there are enough of them: then it has the time
    // of a tile to arrive. In parts each has the time of a few steps.
    template <int kPass, int kParts>
    struct Walk {
        static constexpr int kPart = (kPieces + kParts - 1) / kParts;
        // Pieces at a step from the barrier on: all of them well before the next barrier.
        static constexpr int kAtStep = (2 * kPieces + kPass - 1) / kPass;
        static_assert(kPieces <= kPass * kAtStep);

        const LinearParams& p;
        const unsigned shared;
        RowOperand rows;
        ColumnOperand columns;
        unsigned slot;  // of the tile being multiplied
        unsigned a_lane, b_lane;

        __device__ Walk(const Product& of, int2 at)
            : p(of.p),
              shared(of.shared),
              rows(p.x + blockIdx.y * p.x_batch, nullptr, at.x, p.m - at.x, p.x_row),
              columns(p.weight, p.up, at.y, p.n - at.y, p.weight_row) {
            const int lane = lane_again();
            a_lane = warp_row() * Tile::kRowBytes + Tile::lane_of_k(lane);
            b_lane = kRowTile + warp_column() * Tile::kRowBytes + Tile::lane_of_rows(lane);
            slot = shared;
        }

        // The slots of the tiles before and after: found anew, not kept in registers.
        __device__ unsigned last() const { return slot == shared ? shared + (kStages - 1) * kStage : slot - kStage; }
        __device__ unsigned next() const { return slot == shared + (kStages - 1) * kStage ? shared : slot + kStage; }

        __device__ void fetch(unsigned to, int k0, int from_piece = 0, int to_piece = kPieces) {
            constexpr int kSplit = RowOperand::kDown;
            if (from_piece < kSplit) {
                rows.fetch(to, p.x_row, k0, p.k, from_piece, min(to_piece, kSplit));
            }
            if (to_piece > kSplit) {
                columns.fetch(to + kRowTile, p.weight_row, k0, p.k, max(from_piece, kSplit) - kSplit,
                              to_piece - kSplit);
            }
        }
        __device__ void store(unsigned to, int from_piece = 0, int to_piece = kPieces) {
            constexpr int kSplit = RowOperand::kDown;
            rows.store(to, min(from_piece, kSplit), min(to_piece, kSplit));
            columns.store(to + kRowTile, max(from_piece, kSplit) - kSplit, max(to_piece, kSplit) - kSplit);
        }

        __device__ void begin() {
            if constexpr (kHasAsyncCopy) {
#pragma unroll
                for (int i = 0; i < kStages - 1; i++) fetch(shared + i * kStage, i * kAcross), commit_copies();
                await_copies<kStages - 2>();
            } else {
#pragma unroll
                for (int part = 0; part < kParts; part++) {
                    const int from = part * kPart, to = min(from + kPart, kPieces);
                    fetch(shared, 0, from, to), store(shared, from, to);
                }
                if (kParts == 1) fetch(next(), kAcross);
            }
            __syncthreads();
        }

        // What a step does for the tiles to come, while the one that begins at k0 is multiplied.
        __device__ void bring(int step, int k0) {
            if constexpr (kHasAsyncCopy) {
                const int from = step * kAtStep, to = min(from + kAtStep, kPieces);
                if (from >= kPieces) return;
                fetch(last(), k0 + (kStages - 1) * kAcross, from, to);
                if (to == kPieces) commit_copies();
            } else if constexpr (kPieceByPiece) {
                constexpr int kEach = (kPieces + kPass - 1) / kPass;
                const int from = step * kEach, to = min(from + kEach, kPieces);
                if (from >= kPieces) return;
                store(next(), from, to), fetch(next(), k0 + 2 * kAcross, from, to);
            } else if constexpr (kParts == 1) {
                if (step == kPass - 1) store(next()), fetch(next(), k0 + 2 * kAcross);
            } else {
                constexpr int kLength = kPass / kParts;
                if (step % kLength != 0 || step > kParts * kLength) return;
                const int part = step / kLength;
                if (part > 0) store(next(), (part - 1) * kPart, part * kPart);
                if (part < kParts) fetch(next(), k0 + kAcross, part * kPart, min((part + 1) * kPart, kPieces));
            }
        }

        // From here on the next tile may be read, and this one overwritten.
        __device__ void pass() {
            await_copies<kStages - 2>();
            __syncthreads();
        }

        __device__ void advance() { slot = next(); }

        __device__ void load_a(unsigned (&a)[4], unsigned from, int k, int m) const {
            load_matrices(a, Tile::at(from + a_lane, k, m));
        }
        __device__ void load_b(unsigned (&b)[4], unsigned from, int k, int group) const {
            load_matrices(b, Tile::at(from + b_lane, k, group));
        }
    };

    // sums = x * weight^T for the block's tile. kMixed: steps that the assembler may mix.
    template <bool kFast, int kMixed = kOrdered>
    __device__ void multiply_tiles(Sums& sums) const {
        if constexpr (!kHasTensorCores) {
            multiply_by_lanes(sums);
        } else if constexpr (kFast) {
            multiply_fast(sums);
        } else {
            multiply_precise<kMixed>(sums);
        }
        await_copies<0>();
        __syncthreads();  // the tiles' memory is free
    }

    __device__ static void clear(Sums& sums) {
#pragma unroll
        for (int i = 0; i < kGroups * 2 * kBands * 4; i++) {
            sums[i / (8 * kBands)][i / (4 * kBands) % 2][i / 4 % kBands][i % 4] = Sum{};
        }
    }

    // A lane has the sums that a fragment of C gives it, 2 kBands rows x 16 columns, and multiplies 16 bytes of all of
    // them at a time. A tile is stored while the one before it is multiplied, and the one after it is on its way.
    __device__ void multiply_by_lanes(Sums& sums) const {
        Walk<1, 1> walk(*this, place());
        walk.begin();
        clear(sums);
        const int row = lane_again() / 4, column = lane_again() % 4 * 2;
        const unsigned rows = (warp_row() + row) * Tile::kRowBytes, row_twist = Tile::twist(row) << 4;
        const unsigned columns = kRowTile + (warp_column() + column) * Tile::kRowBytes,
                       column_twist = Tile::twist(column) << 4;
        for (int k0 = 0; k0 < p.k; k0 += kAcross) {
            walk.bring(0, k0);
#pragma unroll 1
            for (unsigned unit = 0; unit < Tile::kRowBytes; unit += 16) {
                multiply_unit(sums, walk.slot + rows + (unit ^ row_twist), walk.slot + columns + (unit ^ column_twist));
            }
            walk.pass();
            walk.advance();
        }
    }

    // 16 bytes of each row and column. Every eighth row is a lane's, and of eight columns two.
    __device__ static void multiply_unit(Sums& sums, unsigned rows, unsigned columns) {
        unsigned a[2 * kBands][4];
#pragma unroll
        for (int r = 0; r < 2 * kBands; r++) load_words(a[r], rows + r * 8 * Tile::kRowBytes);
#pragma unroll
        for (int part = 0; part < kPartsOfDot<Sum>; part++) {
#pragma unroll
            for (int c = 0; c < 16; c++) {
                unsigned b[4];
                load_words(b, columns + (c / 2 * 8 + c % 2) * Tile::kRowBytes);
#pragma unroll
                for (int r = 0; r < 2 * kBands; r++) {
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        dot4(sums[c / 4][c / 2 % 2][r / 2][r % 2 * 2 + c % 2], a[r][w], b[w], part);
                    }
                }
            }
        }
    }

    template <int kMixed>
    __device__ void multiply_precise(Sums& sums) const {
        constexpr int kTurns = kSteps * kBands, kPass = kTurns - kAhead;
        static_assert(kTurns % (kAhead + 1) == 0 && kSteps % 2 == 0);
        unsigned a[kAhead + 1][4], b[2][kGroups][4];
        // Integer sums leave sm_75 no registers for more than a piece.
        constexpr int kParts = kBands == 4 ? 1 : kThreads == 256 ? 3 : kIntegers ? kPieces : 5;
        Walk<kPass, kParts> walk(*this, place());
        walk.begin();
        clear(sums);
#pragma unroll
        for (int i = 0; i < kAhead; i++) walk.load_a(a[i], walk.slot, 0, i);
#pragma unroll
        for (int g = 0; g < kGroups; g++) walk.load_b(b[0][g], walk.slot, 0, g);
        for (int k0 = 0; k0 < p.k; k0 += kAcross) {
#pragma unroll
            for (int turn = 0; turn < kTurns; turn++) {
                const int k = turn / kBands, m = turn % kBands, after = (turn + kAhead) % kTurns;
                if (turn % kMixed == 0) keep_order(p.k, turn);
                if (!kPieceByPiece) walk.bring(turn, k0);
                if (turn == kPass) walk.pass();
                walk.load_a(a[(turn + kAhead) % (kAhead + 1)], after > turn ? walk.slot : walk.next(), after / kBands,
                            after % kBands);
                // The weight's next fragments, half of them where the registers of the last are free.
                const auto load_b = [&](int g) {
                    walk.load_b(b[(k + 1) % 2][g], k + 1 < kSteps ? walk.slot : walk.next(), (k + 1) % kSteps, g);
                };
                const bool last = m == kBands - 1;
                if (last) load_b(0), load_b(1);
                const auto done = [&](int g) {
                    if (last && g < 2) load_b(2 + g);
                };
                multiply_band(sums, m, a[turn % (kAhead + 1)], b[k % 2], done, [&] {
                    if (kPieceByPiece) keep_order(p.k, kTurns + turn), walk.bring(turn, k0);
                });
            }
            walk.advance();
        }
    }

    // 16 rows x 64 columns x 16 of k. done(g): for the last time 16 columns' fragments have been used. between(): on
    // sm_75, half of the products are done.
    template <typename Done, typename Between>
    __device__ static void multiply_band(Sums& sums, int m, const unsigned (&a)[4], const unsigned (&b)[kGroups][4],
                                         Done done, Between between) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            mma_step(sums[g][0][m], a, b[g][0], b[g][1]);
            mma_step(sums[g][1][m], a, b[g][2], b[g][3]);
            done(g);
        }
#else
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (half == 1) between();
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                mma_half_step(sums[g][0][m], a[2 * half], a[2 * half + 1], b[g][half]);
                mma_half_step(sums[g][1][m], a[2 * half], a[2 * half + 1], b[g][2 + half]);
                if (half == 1) done(g);
            }
        }
#endif
    }

    // 16 columns after the other, and of these 16 or 32 rows after the other: two k-steps in half sums, which are added
    // to the float ones while the next are multiplied.
    __device__ void multiply_fast(Sums& sums) const {
        static_assert(kBands == 4, "the fragments of 32 of k take the registers of two more bands");
        constexpr int kDown = 4 / kBeside, kRound = kGroups * kDown, kTurns = kSteps / 2 * kRound;
        // The last columns' fragments are in registers: the tile has been read.
        constexpr int kPass = kTurns - kDown;
        constexpr int kApart = kHasAsyncCopy ? 2 : kThreads == 64 ? 4 : 1;  // turns that the assembler may mix
        unsigned a[2][4][4], b[2][2][4];
        Parts part[2];
        Walk<kPass, 3> walk(*this, place());
        walk.begin();
        clear(sums);
#pragma unroll
        for (int i = 0; i < 4 * kBeside; i++) part[1][i / 2 / kBeside][i / 2 % kBeside][i % 2] = 0;
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int m = 0; m < 4; m++) walk.load_a(a[k][m], walk.slot, k, m);
            walk.load_b(b[0][k], walk.slot, k, 0);
        }
        for (int k0 = 0; k0 < p.k; k0 += kAcross) {
#pragma unroll
            for (int turn = 0; turn < kTurns; turn++) {
                const int round = turn / kRound, group = turn % kRound / kDown, m = turn % kDown * kBeside;
                const unsigned after =
                    turn + kRound < kTurns ? walk.slot : walk.next();  // where the next round's k lies
                const int then = (round + 1) * 2 % kSteps;
                if (turn % kApart == 0) keep_order(p.k, turn);
                walk.bring(turn, k0);
                if (turn == kPass) walk.pass();
                if (m == 0) {
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        const bool same = group + 1 < kGroups;
                        walk.load_b(b[(group + 1) % 2][k], same ? walk.slot : after, same ? round * 2 + k : then + k,
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
                const int last = (turn + kRound - 1) % kRound;
                fold(sums[last / kDown], last % kDown * kBeside, part[(turn + 1) % 2]);
                if (group == kGroups - 1) {
#pragma unroll
                    for (int i = 0; i < 2 * kBeside; i++) {
                        walk.load_a(a[i % 2][m + i / 2], after, then + i % 2, m + i / 2);
                    }
                }
            }
            walk.advance();
        }
        fold(sums[kGroups - 1], 4 - kBeside, part[1]);
    }
};
