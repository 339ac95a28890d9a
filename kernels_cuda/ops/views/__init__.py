"""How ops see tensors: rows, tiles, planes, numbers in parts; and the checks that they share."""
