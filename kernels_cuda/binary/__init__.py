"""Compiled code: the cards it is for, the prebuilt archive, an ELF reader, and the driver calls
that load and launch it."""
