"""Between stored numbers and halves: INT8 rows, GGUF blocks, fp8, and the rotation that INT8 wants."""
