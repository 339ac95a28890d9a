// The products of attention in 8 bits: scores of s8 by s8, values of u8 by s8, with C tiles that begin at a number of
// the caller's. kM blocks of 8 rows; two of them are the 16 rows of a fragment from sm_80 on.
//
// Sums that begin at kMagicBits end as the bits of a float: kMagic and the sum, exactly, while that is below 2^22. Of
// scores it is at most 127 * 127 * 256, of values 64 * 254 * 127.
#pragma once

#include "mma.cuh"

constexpr int kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;

// kMagicBits where the compiler cannot know it: it would make a new register of it for every product.
struct Magic {
    int bits[kHasAsyncCopy ? 4 : 2];

    // room: 16 bytes of shared memory for each thread, free again afterwards.
    __device__ void make(unsigned room) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
        for (int& word : bits) asm volatile("mov.u32 %0, 0x4b400000;" : "=r"(word));
#else
        // A move is seen through there.
        const unsigned own = room + threadIdx.x * 16;
#pragma unroll
        for (int& word : bits) {
            asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(own), "r"(kMagicBits) : "memory");
            asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(word) : "r"(own) : "memory");
        }
        __syncthreads();
#endif
    }
};

#if __CUDA_ARCH__ >= 800
#define MMA_16832(NAME, TYPES)                                                                                 \
    __device__ inline void NAME(int (&d)[2], int (&e)[2], const unsigned (&a)[2], const unsigned (&a8)[2],     \
                                unsigned b0, unsigned b1, const int (&c)[4]) {                                 \
        asm("mma.sync.aligned.m16n8k32.row.col.s32." TYPES                                                     \
            ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                         \
            : "=r"(d[0]), "=r"(d[1]), "=r"(e[0]), "=r"(e[1])                                                   \
            : "r"(a[0]), "r"(a8[0]), "r"(a[1]), "r"(a8[1]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), \
              "r"(c[3]));                                                                                      \
    }
MMA_16832(mma_signed, "s8.s8")
MMA_16832(mma_weights, "u8.s8")
#else
#define MMA_8816(NAME, TYPES)                                                                    \
    __device__ inline void NAME(int (&d)[2], unsigned a, unsigned b, int c0, int c1) {           \
        asm("mma.sync.aligned.m8n8k16.row.col.s32." TYPES ".s32 {%0, %1}, {%2}, {%3}, {%4, %5};" \
            : "=r"(d[0]), "=r"(d[1])                                                             \
            : "r"(a), "r"(b), "r"(c0), "r"(c1));                                                 \
    }
MMA_8816(mma_signed, "s8.s8")
MMA_8816(mma_weights, "u8.s8")
#endif

// Of a step of 32 of d: two C tiles of 8 keys each. b: of either, k lo and k hi.
template <int kM>
__device__ inline void multiply_scores(int (&c)[2][kM][2], const unsigned (&a)[kM][2], const unsigned (&b)[4],
                                       const Magic& magic, bool first) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int m = 0; m < kM; m += 2) {
            const int so_far[4] = {c[j][m][0], c[j][m][1], c[j][m + 1][0], c[j][m + 1][1]};
            mma_signed(c[j][m], c[j][m + 1], a[m], a[m + 1], b[2 * j], b[2 * j + 1], first ? magic.bits : so_far);
        }
    }
#else
    // All first halves go before all second ones, so that neighbours do not wait for each other's result.
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int m = 0; m < kM; m++) {
                const bool begins = first && h == 0;
                mma_signed(c[j][m], a[m][h], b[2 * j + h], begins ? magic.bits[0] : c[j][m][0],
                           begins ? magic.bits[1] : c[j][m][1]);
            }
        }
    }
#endif
}

#if __CUDA_ARCH__ >= 800
// 64 keys by 8 channels. w: bytes of 16 keys each, b: of 8 channels the same keys.
template <int kM>
__device__ inline void multiply_values(int (&c)[kM][2], const unsigned (&w)[kM][4], const unsigned (&b)[4],
                                       const Magic& magic) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int m = 0; m < kM; m += 2) {
            const int so_far[4] = {c[m][0], c[m][1], c[m + 1][0], c[m + 1][1]};
            const unsigned upper[2] = {w[m][2 * h], w[m][2 * h + 1]}, lower[2] = {w[m + 1][2 * h], w[m + 1][2 * h + 1]};
            mma_weights(c[m], c[m + 1], upper, lower, b[2 * h], b[2 * h + 1], h == 0 ? magic.bits : so_far);
        }
    }
}
#else
// ... by 16 channels.
template <int kM>
__device__ inline void multiply_values(int (&c)[2][kM][2], const unsigned (&w)[kM][4], const unsigned (&b)[2][4],
                                       const Magic& magic) {
#pragma unroll
    for (int h = 0; h < 4; h++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int m = 0; m < kM; m++) {
                mma_weights(c[j][m], w[m][h], b[j][h], h == 0 ? magic.bits[0] : c[j][m][0],
                            h == 0 ? magic.bits[1] : c[j][m][1]);
            }
        }
    }
}
#endif

// 16 bytes on their way from global to shared memory.
struct Piece {
    uint4 held;

    __device__ void fetch(const signed char* from) {
        // Volatile: the load starts here, not where its value is wanted.
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(held.x), "=r"(held.y), "=r"(held.z), "=r"(held.w)
                     : "l"(from));
    }
    __device__ void store(unsigned to) const {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(held.x), "r"(held.y), "r"(held.z),
                     "r"(held.w)
                     : "memory");
    }
    // By the copy unit, where there is one.
    __device__ void copy(unsigned to, const signed char* from) {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
        fetch(from);
        store(to);
#endif
    }
};
