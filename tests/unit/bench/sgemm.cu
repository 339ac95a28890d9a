// A product of floats for the test of Pascal's model: 128x128 of a block, 8x8 of a thread, 8 of k at a time in two buffers.
// a: [k, m], b: [k, n], c: [m, n].
extern "C" __global__ void __launch_bounds__(256, 2)
    sgemm(const float4* __restrict__ a, const float4* __restrict__ b, float4* __restrict__ c, int k, int m4, int n4) {
    __shared__ float4 tiles[2][2][8][32];
    const int thread = threadIdx.x, row = thread / 32, lane = thread % 32;
    const int x = (thread / 2) % 8 + thread / 128 * 8 * 2, y = thread % 2 + thread / 16 % 8 * 2;
    const float4 *next_a = a + row * m4 + blockIdx.y * 32 + lane, *next_b = b + row * n4 + blockIdx.x * 32 + lane;
    float sums[8][8] = {};
    tiles[0][0][row][lane] = *next_a;
    tiles[0][1][row][lane] = *next_b;
    __syncthreads();
    int buffer = 0;
    for (int step = 8; step <= k; step += 8, buffer ^= 1) {
        float4 ahead_a = {}, ahead_b = {};
        if (step < k) {
            ahead_a = *(next_a += 8 * m4);
            ahead_b = *(next_b += 8 * n4);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 a0 = tiles[buffer][0][i][x], a1 = tiles[buffer][0][i][x + 8];
            const float4 b0 = tiles[buffer][1][i][y], b1 = tiles[buffer][1][i][y + 16];
            const float rows[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
            const float columns[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
            for (int r = 0; r < 8; r++) {
#pragma unroll
                for (int q = 0; q < 8; q++) sums[r][q] += rows[r] * columns[q];
            }
        }
        if (step < k) {
            tiles[buffer ^ 1][0][row][lane] = ahead_a;
            tiles[buffer ^ 1][1][row][lane] = ahead_b;
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        float4* out = c + (blockIdx.y * 128 + x * 4 + r / 4 * 32 + r % 4) * n4 + blockIdx.x * 32 + y;
        out[0] = make_float4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        out[16] = make_float4(sums[r][4], sums[r][5], sums[r][6], sums[r][7]);
    }
}
