// GELU in a few instructions: for the activations alone and for those at the end of a matrix product.
#pragma once

#include "fast.cuh"

// x * phi(x). phi(-|x|) = exp(-x^2 / 2) * P(t), t = 1 / (1 + k |x|), with P fitted for the least relative error
// (2.4e-7 down to |x| = 6.4, beyond which fp16 has only zeros). Unlike 1 + erf it loses no digits for negative x.
__device__ inline float gelu_erf(float x) {
    const float t = reciprocal_fast(fmaf(0.28284273f, fabsf(x), 1.0f));
    float p = -0.10832050f;
    p = fmaf(p, t, 0.39056775f);
    p = fmaf(p, t, -0.25004306f);
    p = fmaf(p, t, 0.29450852f);
    p = fmaf(p, t, 0.05006062f);
    p = fmaf(p, t, 0.12407452f);
    p = fmaf(p, t, -0.00084782328f);
    const float tail = p * exp2_fast(-0.72134752f * x * x);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): 0.5 x (1 + tanh(u)).
__device__ inline float gelu_tanh(float x) {
    return times_logistic(x, 1.5957691216f * fmaf(0.044715f * x, x * x, x));
}
