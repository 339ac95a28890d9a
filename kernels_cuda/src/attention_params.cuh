// The arguments of attention, the same struct for every kernel. Mirrored by AttentionParams in
// ops/attention/attention.py.
#pragma once

#include "mma.cuh"

enum class Asked { kPlain, kListed, kAny };  // lengths and grouped heads; block lists too; everything

struct AttentionParams {
    const __half* q;
    const __half* k;
    const __half* v;
    __half* out;
    const int* key_lengths;     // [batch], or null: every batch row has k_length keys
    const __half* bias;         // added to the scaled scores, or null
    const unsigned char* mask;  // nonzero: attend, or null
    const float* relative;      // [head, distance]: added to the scaled scores, or null
    const int* block_list;      // key blocks a query block visits, or null: all
    const int* block_counts;    // how many
    const float* q_scales;      // of 8-bit queries, one per row; null where they are halves
    const float* k_scales;      // of 8-bit keys, one per 32 keys, four for each 128; or one per 64
    const float* v_scales;      // of 8-bit values, one per channel; null where they are halves
    const float* v_means;       // ... what was taken from them before they were rounded
    const int* v_sums;          // ... sums of the rounded ones
    // What stands for the key blocks that a query block does not visit: the mean of each block's keys, the mean of its
    // values, and which blocks it does visit, a bit each, least first. Null: nothing stands for them.
    const __half* tail_k;
    const __half* tail_v;
    const float* tail_scales;  // of 8-bit means, as k_scales
    const unsigned* visited;   // an even number of words for each query block
    // Strides, in units of 2 bytes; the elements of a head are adjacent, 16-byte aligned.
    i64 q_batch, q_token, q_head;
    i64 k_batch, k_token, k_head;
    i64 v_batch, v_token, v_head;
    i64 out_batch, out_token, out_head;
    i64 bias_batch, bias_head, bias_query;  // 0: shared. Keys are adjacent
    i64 mask_batch, mask_head, mask_query;
    i64 relative_head;
    i64 list_batch, list_head, list_query;  // of block_list; list_query: from query block to query block
    i64 count_batch, count_head;            // of block_counts; query blocks are adjacent
    i64 q_scale_batch, q_scale_head;        // rows are adjacent
    i64 k_scale_batch, k_scale_head;
    i64 tail_k_batch, tail_k_token, tail_k_head, tail_v_batch, tail_v_token, tail_v_head;
    i64 tail_scale_batch, tail_scale_head, visited_batch, visited_head, visited_query;
    int q_length, k_length;
    int heads_per_key_head;
    // Query i sees keys from i + shift - left to i + shift + right, where shift = k_length - q_length; -1: no limit.
    // Causal is right = 0.
    int window_left, window_right;
    int relative_zero;  // where distance 0 (key - query) stands in a row of `relative`
    // Rows of a query block and keys of a key block of block_list: multiples of the kernel's rows per block, and of 64.
    int list_rows, list_keys;
    int tail_length;
    float scale_log2;  // softmax scale * log2(e); positive
    float tail_log2;   // log2 of a block's keys: so often its mean counts. A shorter block has to be visited
    int is_bf16;       // out and bias: bf16, not half. Of 8-bit values alone
};
