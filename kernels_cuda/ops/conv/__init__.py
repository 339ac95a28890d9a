"""Convolutions of pictures and videos, with borders, and after an upsampling."""
