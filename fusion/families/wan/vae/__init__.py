"""The Wan VAEs over our kernels, within a memory limit."""
