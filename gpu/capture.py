"""Whether work is being recorded instead of done."""

from __future__ import annotations

import torch


def capturing() -> bool:
    """Whether torch's current stream is being recorded into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
