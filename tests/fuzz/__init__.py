"""Fuzzing of what strangers hand us: the safetensors header. `python tests/fuzz/headers.py --help`."""
