// A step of a chain, launched by the host.

#include "chain_step.cuh"

extern "C" __global__ void __launch_bounds__(kChainThreads) chain_step(const __grid_constant__ ChainParams p) {
    chain(p);
}
