"""Language models that ComfyUI encodes and writes with: stock's own modules over our kernels. Families say which files are
theirs."""
