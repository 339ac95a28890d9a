"""Compiled code: which cards it is for, the prebuilt archive, what is in an ELF, and the driver's calls that load and launch it."""
