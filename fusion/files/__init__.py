"""What a checkpoint holds, told from its names, shapes and notes alone.

prefix.py           before which names a file has its model   completeness.py      whether it holds the whole of it
repeated_blocks.py  what alike blocks have                    quant_metadata.py    how it says that it is quantised
llama_cpp.py        llama.cpp's names for tensors             sentencepiece.py     a tokenizer that a file carries
checkpoint_parts.py which tensors are the model's, the text encoders', the VAE's
"""
