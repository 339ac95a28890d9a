"""Video in real time: frames pass one by one, or a few at a time, through the steps of an image
model, and leave as they are made.

    settings.py  settings of a run           sources.py   sources of frames, read ahead
    change.py    difference of two frames    pictures.py  between pixels and latents
    steps.py     noise, network and blend    lanes.py     CUDA streams for the stages
    engine.py    the way of a frame          video.py     frames into a file as they come

The engine is a sampler as stock has them: stock loads the model, prepares the prompts and calls
what other nodes have put around a sampling, once for all frames.
"""
