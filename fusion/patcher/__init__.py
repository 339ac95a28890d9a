"""The MODEL of a streamed network, and the wrappers around each call of it.

streaming_patcher.py  a stock ModelPatcher to every other node
vram_estimate.py      how free VRAM is divided before a step
vram_retry.py         what is done when a step ran out of it
call_log.py           the branch of a graph of each call
conditions.py         prompts, copied to the card once
prepared_prompts.py   prompts, prepared by the network once
saving.py             saved weight by weight
cards.py              one sampling on several cards
"""
