"""One file per op family; its device code is `../src/<family>.cu`."""
