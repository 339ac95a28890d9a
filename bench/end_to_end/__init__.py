"""Whole models against stock ComfyUI: rows, one process for each side of a row, bounds, results."""
