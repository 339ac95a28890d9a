"""The MODEL of a streamed network, and what stands around each call of it.

streaming_patcher.py  to every other node a stock ModelPatcher     saving.py     saved weight by weight
vram_estimate.py      how free VRAM is divided before a step       conditions.py prompts, on the card once
vram_retry.py         what happens when a step ran out of it       cards.py      one sampling on several cards
call_log.py           of which branch of a graph each call was
"""
