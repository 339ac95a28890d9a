"""The rows of ops: one file for each family of ops, with a list ROWS."""
