// norm_to_int4: rows that are normalised and modulated, as 4-bit numbers, two to a byte. The maths, the layout and the
// access pattern stand at the head of norm_to_integers.cuh.

#include "norm_to_integers.cuh"

NORMS_TO_INTEGERS(4)
