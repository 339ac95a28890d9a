"""Networks other than diffusion models, loaded whole: stock's upscale models, BiRefNet, RT-DETR and
depth models, and networks that give pictures another look. Streamed models do not depend on
them."""
