// What every kernel includes: CUDA's half, and the 64-bit integer that products of sizes are computed in.
#pragma once

#include <cuda_fp16.h>

using i64 = long long;
