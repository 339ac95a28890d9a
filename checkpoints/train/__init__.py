"""How the files in `checkpoints/trained` were made: a small Wan 2.1, its VAE and its text encoder,
trained on the toy world.

    python -m checkpoints.train vae   --out DIR                    nine minutes of a large GPU
    python -m checkpoints.train model --out DIR                    nine more; the text encoder
                                                                   learns along with it

Each stage leaves its files as stock loads them, a log with its loss curve, and a state from which
`--resume` goes on. Nothing is downloaded: a seeded generator makes scenes, captions and films as
they are needed.

`vae.py`, `transformer.py` and `text.py` are twins of stock's classes: the same tensors under the
same names and the same maths, written for speed in training (a whole film at once, whole batches,
bf16 products). A test holds them to stock's results.
"""
