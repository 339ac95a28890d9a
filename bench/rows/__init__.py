"""What is measured: one file per op family, each with a list ROWS."""
