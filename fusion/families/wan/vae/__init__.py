"""The Wan VAEs over our kernels, within a bound of memory."""
