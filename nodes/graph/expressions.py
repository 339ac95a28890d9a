"""Which formulas of stock's Math Expression node are worked out before a graph runs.

Stock computes with whole numbers of any length, and a power of a power takes minutes, in which
Python does nothing else: `4000000 ** 4000000` is short to type. Such a formula is left to the run.
"""

from __future__ import annotations

import ast

LONGEST = 1000  # letters
LARGEST_EXPONENT = 64


def is_short(formula: object) -> bool:
    """Whether the formula takes no time: it has at most one power, by a small number."""
    if not isinstance(formula, str) or len(formula) > LONGEST:
        return False
    try:
        exponents = [found for node in ast.walk(ast.parse(formula.strip(), mode="eval")) for found in _exponents(node)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what Python's parser raises
        return False
    return not exponents or (len(exponents) == 1 and _is_small(exponents[0]))


def _exponents(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return [node.right]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "pow":
        return node.args[1:]
    return []


def _is_small(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and abs(node.value) <= LARGEST_EXPONENT
    )
