// rows_to_int4: the rows of a matrix as 4-bit numbers, two to a byte. The maths, the layout and the access pattern
// stand at the head of integer_rows.cuh.

#include "integer_rows.cuh"

INTEGER_ROWS(4, 1, 256)
INTEGER_ROWS(4, 2, 512)
INTEGER_ROWS(4, 4, 1024)
