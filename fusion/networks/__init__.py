"""Networks that are no diffusion models and are loaded whole: stock's upscale models, BiRefNet, RT-DETR and depth models, and those
that give pictures another look. No model that streams knows of them."""
