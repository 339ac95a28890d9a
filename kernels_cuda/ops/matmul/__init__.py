"""Products of matrices: halves, INT8, packed rows, and whichever of them a weight asks for."""
