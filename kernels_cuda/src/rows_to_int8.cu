// rows_to_int8: the rows of a matrix as 8-bit numbers, a byte each. The maths, the layout and the access pattern stand
// at the head of integer_rows.cuh.

#include "integer_rows.cuh"

INTEGER_ROWS(8, 1, 256)
INTEGER_ROWS(8, 2, 512)
INTEGER_ROWS(8, 4, 1024)
