"""The proof: what is measured, and how."""
