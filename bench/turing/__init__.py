"""A model of Turing cards over the machine code itself: what a kernel's main loop can reach on a card nobody here owns."""
