"""Language models that ComfyUI encodes and writes text with: stock's modules over our kernels. Each
family says which files are its own."""
