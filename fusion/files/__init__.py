"""What a checkpoint holds, told from its names, shapes and notes alone.

repeated_blocks.py   the blocks in its names    completeness.py    whether it holds the whole model
checkpoint_parts.py  the parts of a whole one   quant_metadata.py  how it says that it is quantised
llama_cpp.py         llama.cpp's names          sentencepiece.py   a tokenizer that a file carries
"""
