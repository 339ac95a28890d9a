"""The trained small model: a Wan 2.1 T2V of 256, its text encoder and its VAE, that know the toy
world (`checkpoints/toys`).

Made by `checkpoints/train`; `training.json` has the loss curves and what the films showed. Beside
it a style network of `checkpoints/train/style.py`, the example of the style nodes.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODEL = "toys_wan_t2v_fp16.safetensors"
TEXT = "toys_umt5_fp16.safetensors"
VAE = "toys_wan_vae_fp16.safetensors"
LOG = "training.json"
STYLE = "style_ink_fp16.safetensors"


def files(folder: Path = FOLDER) -> list[Path]:
    """Diffusion model, text encoder, VAE; of another training if a folder is given."""
    return [folder / MODEL, folder / TEXT, folder / VAE]
