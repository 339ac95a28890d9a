"""Norms, with what follows them in the same pass: modulation, SiLU, rotary positions, keys that are kept."""
