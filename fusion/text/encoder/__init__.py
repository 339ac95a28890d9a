"""Blocks of bidirectional encoders and of vision towers, as one kind: `block.py` describes a block
and computes it, `described.py` reads the description off stock's classes, `clip.py` serves stock's
CLIPEncoder, which CLIP for text and SigLIP have in common.

BERT (HunyuanDiT) and Jina CLIP 2 (NewBie) are of another kind, and are stock's: a norm follows each
addition, so no stream passes through their blocks untouched."""
