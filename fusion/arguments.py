"""What calls of a model are given, as keys and tensors: the ground floor's (`gpu/arguments.py`), by the name under which what is
captured of models here has it."""

from ..gpu.arguments import PLAIN, Unfit, is_plain, own_copy, put_together, same_numbers, span, taken_apart

__all__ = ["PLAIN", "Unfit", "is_plain", "own_copy", "put_together", "same_numbers", "span", "taken_apart"]
