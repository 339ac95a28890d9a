// Stores of 16, 8 or 4 bytes, spelled out: of an assignment the compiler makes stores of 4 bytes in unrolled loops with
// conditions, where a branch around the load hides that the words belong together.
#pragma once

__device__ inline void store_whole(void* p, const unsigned (&from)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(p), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}
__device__ inline void store_whole(void* p, const unsigned (&from)[2]) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(p), "r"(from[0]), "r"(from[1]) : "memory");
}
__device__ inline void store_whole(void* p, const unsigned (&from)[1]) {
    asm volatile("st.global.u32 [%0], %1;" : : "l"(p), "r"(from[0]) : "memory");
}
