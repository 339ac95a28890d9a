"""The contents of a checkpoint, told from its names, shapes and metadata alone.

repeated_blocks.py   the blocks in its names    completeness.py    whether it holds the whole model
checkpoint_parts.py  the parts of a whole one   quant_metadata.py  how its layers are quantised
llama_cpp.py         llama.cpp's names          sentencepiece.py   a tokenizer that a file carries
"""
