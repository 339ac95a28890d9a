// The part of the input that a block's pixels see, 32 channels of one frame at a time, in shared memory.
//
// A block computes kImageRows x 16 pixels. Under all taps they see kHeight x kWidth pixels of the input; each of these
// is a row of 64 bytes, swizzled like a tile of mma.cuh. A fragment of A is 16 pixels of an image row, for one tap:
// rows of the patch one behind the other, wherever the tap puts the first. Eight in a row meet eight different banks.
// With a stride of two every other pixel would be wanted, so even pixels stand before odd ones and are neighbours
// again.
//
// From image row to image row the pitch moves the swizzle by two units or not at all (it is 4 modulo 8, or 0): an XOR
// known at compile time. So a lane has one address for each tap of a row, and reaches all else by constants.
#pragma once

#include "staging.cuh"

constexpr int kStepK = 32;        // channels of a patch, and elements of k of a tile of weights
constexpr int kPatchPixels = 16;  // of an image row that a block computes

template <int kTapRows, int kTapColumns, int kStride, int kImageRows>
struct Patch {
    static constexpr int kHeight = (kImageRows - 1) * kStride + kTapRows;
    static constexpr int kWidth = (kPatchPixels - 1) * kStride + kTapColumns;
    static constexpr int kOdd = 20;  // where the odd pixels start, of a stride of two
    static constexpr int kPitch = kStride == 2 ? 36 : kTapColumns == 1 ? 16 : 20;
    static constexpr int kRowBytes = kPitch * 64, kBytes = kHeight * kRowBytes;
    static constexpr int kUnits = kHeight * kWidth * 4;  // of 16 bytes, to be brought
    static_assert((kStride == 2 ? kOdd + kWidth / 2 : kWidth) <= kPitch && (kStride == 1 || (kWidth + 1) / 2 <= kOdd));

    __device__ static constexpr int place(int pixel) { return kStride == 2 ? pixel / 2 + pixel % 2 * kOdd : pixel; }
    __device__ static int offset(int row, int pixel, int unit) {
        const int at = row * kPitch + place(pixel);
        return at * 64 + ((unit ^ (at >> 1 & 3)) << 4);
    }
    // The address, from the patch's first byte, that a lane gives to ldmatrix for tap column `tap` of the first row.
    __device__ static int lane(int lane, int tap) { return offset(0, (lane & 15) * kStride + tap, lane >> 4); }

    // From a lane's address to that of the second k-step (step 1) and of an image row further down.
    __device__ static constexpr unsigned twist(int step, int row) {
        return (2 * step ^ (kPitch % 8 == 4 ? row % 2 * 2 : 0)) << 4;
    }
};

// Where the patch's pixels lie: one frame, of x or of the cache.
struct Frame {
    const __half* at;
    int row, pixel;  // strides
};

// A block's copies of a patch, in parts of kPart units of 16 bytes for each thread. origin: the input pixel of the
// patch's corner. What lies outside the image or beyond the channels is zero and not read; kBordered: outside the
// image and its border, which has pixels of the image.
template <class Shape, int kThreads, bool kBordered>
struct PatchCopy {
    static constexpr int kSteps = (Shape::kUnits + kThreads - 1) / kThreads;

    // The row or column of the image that is seen at this one. A border is narrower than the image; what a block sees
    // beyond it, next to the image's far end, is nobody's, and may come out as negative.
    __device__ static int inside(int at, int size, int border) {
        if (border == kReplicate) return min(max(at, 0), size - 1);
        const int from_start = at < 0 ? -at : at;
        return from_start < size ? from_start : 2 * (size - 1) - from_start;
    }

    template <int kPart, int kHeld>
    __device__ static void fetch(uint4 (&held)[kHeld], unsigned patch, const Frame& frame, int2 origin, int height,
                                 int width, int channels, int border, int part) {
#pragma unroll
        for (int i = 0; i < kPart; i++) {
            const int index = (part * kPart + i) * kThreads + thread_again(), unit = index % 4;
            if (index >= Shape::kUnits) continue;
            const int row = index / 4 / Shape::kWidth, pixel = index / 4 % Shape::kWidth;
            int y = origin.y + row, x = origin.x + pixel;
            if (kBordered) y = inside(y, height, border), x = inside(x, width, border);
            const bool exists = unsigned(y) < unsigned(height) && unsigned(x) < unsigned(width) && unit * 8 < channels;
            const __half* source = frame.at + (y * frame.row + x * frame.pixel + unit * 8);
#if __CUDA_ARCH__ >= 800
            asm volatile(
                "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(patch + Shape::offset(row, pixel, unit)),
                "l"(source), "r"(exists ? 16 : 0)
                : "memory");
#else
            load_if(held[i], source, exists);
#endif
        }
    }

    template <int kPart, int kHeld>
    __device__ static void store(const uint4 (&held)[kHeld], unsigned patch, int part) {
#if __CUDA_ARCH__ < 800
#pragma unroll
        for (int i = 0; i < kPart; i++) {
            const int index = (part * kPart + i) * kThreads + thread_again();
            if (index >= Shape::kUnits) continue;
            const int row = index / 4 / Shape::kWidth, pixel = index / 4 % Shape::kWidth;
            put(patch + Shape::offset(row, pixel, index % 4), held[i]);
        }
#endif
    }

    // Volatile: the load starts here, not where its value is wanted.
    __device__ static void load_if(uint4& unit, const __half* from, bool exists) {
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
            "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "=&r"(unit.x), "=&r"(unit.y), "=&r"(unit.z), "=&r"(unit.w)
            : "l"(from), "r"(unsigned(exists)));
    }
    __device__ static void put(unsigned address, const uint4& unit) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(unit.x), "r"(unit.y), "r"(unit.z),
                     "r"(unit.w)
                     : "memory");
    }
};
