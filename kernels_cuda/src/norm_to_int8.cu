// norm_to_int8: rows that are normalised and modulated, as 8-bit numbers, a byte each. The maths, the layout and the
// access pattern stand at the head of norm_to_integers.cuh.

#include "norm_to_integers.cuh"

NORMS_TO_INTEGERS(8)
