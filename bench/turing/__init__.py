"""A model of Turing, Ampere and Ada cards over the machine code: what a kernel's main loop can reach on a card nobody here owns."""
