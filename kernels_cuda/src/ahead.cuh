// Kernels that are launched before the one before them has ended ("programmatic dependent launch", compute
// capability 9.0 and newer), so that what a launch costs passes beside the other's end.
//
//     __global__ first:   next_may_begin();     once every block has said so or ended, the next launch's are let in
//     __global__ second:  ... what the first does not write ...
//                         wait_for_last();      all of the first's writes are there
//                         ... what the first writes ...
//
// A block that is let in takes what the first's blocks have left free, so it says `next_may_begin` as early as it
// likes: there is nobody left whose place it could take. Launched in the usual way, both say nothing. Every thread of a
// kernel that may be launched so must wait: the one after it relies on it having waited for all before.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FUSESTREAM_AHEAD 1
#else
#define FUSESTREAM_AHEAD 0
#endif

// Tells the host whether this code of a kernel waits; of an older archive, which lacks it, it is taken that it does
// not.
#define WAITS(NAME) extern "C" __device__ int NAME##_waits[1] = {FUSESTREAM_AHEAD};

__device__ inline void next_may_begin() {
#if FUSESTREAM_AHEAD
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void wait_for_last() {
#if FUSESTREAM_AHEAD
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
