"""Vision towers of language models that see, over our kernels: `towers.py` fuses all that a text
encoder model has, and each kind has a file of its own, over the blocks of `text/encoder/`."""
