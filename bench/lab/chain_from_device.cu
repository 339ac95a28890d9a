// Steps of a chain that the device launches (dynamic parallelism), and a graph that launches itself again.
//
//   chain_by_one     one thread launches all steps, one after the other, into its block's stream
//   chain_by_next    each step launches the next when it ends (a tail launch), as deep as launches may nest
//   chain_again      the last node of a graph: launches the graph once more, until there are no tokens left
//
// Built with separate compilation and linked with the device runtime, which every launch here is a call of.

#include "chain_step.cuh"

extern "C" __global__ void __launch_bounds__(kChainThreads) chain_step_linked(ChainParams p) {
    chain(p);
}

struct ChainOfSteps {
    ChainParams step;
    int steps;
};

extern "C" __global__ void __launch_bounds__(1) chain_by_one(const __grid_constant__ ChainOfSteps p) {
    ChainParams step = p.step;
    for (step.step = 0; step.step < p.steps; step.step++) chain_step_linked<<<step.blocks, kChainThreads>>>(step);
}

extern "C" __global__ void __launch_bounds__(kChainThreads) chain_by_next(ChainOfSteps p) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.step.step + 1 < p.steps) {
        ChainOfSteps next = p;
        next.step.step++;
        chain_by_next<<<next.step.blocks, kChainThreads, 0, cudaStreamTailLaunch>>>(next);
    }
    chain(p.step);
}

struct AgainParams {
    int* left;  // tokens
};

extern "C" __global__ void __launch_bounds__(1) chain_again(const __grid_constant__ AgainParams p) {
    if (--*p.left > 0) cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
}
