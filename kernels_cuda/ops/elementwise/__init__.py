"""Passes over elements: activations, gated residuals, a diffusion step."""
