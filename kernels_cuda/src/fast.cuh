// One-instruction approximations, good to a few units in the last place of a float and so invisible after rounding to
// half. Results that a normal float cannot hold become zero.
#pragma once

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / (1 + exp(-y)): x times the logistic function of y. Where the exponential overflows the factor is zero, so an
// infinite x gives NaN there, as in torch.
__device__ inline float times_logistic(float x, float y) {
    return x * reciprocal_fast(1.0f + exp2_fast(-1.4426950409f * y));
}
