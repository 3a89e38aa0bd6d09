"""Parses Python, whatever else the process does."""

from __future__ import annotations

import ast
import gc


def parsed(text: str) -> ast.Module:
    """Return a program's syntax tree, as ast.parse does, with garbage collection off.

    Before Python 3.11.8, ast.parse counts its depth in one place for all calls of the process. A collection
    while it builds the tree runs finalizers, and may let another thread run. If one of them parses, as the
    logging of a traceback does, ast.parse raises SystemError "AST constructor recursion depth mismatch"
    (CPython gh-106905). Without collections, no other Python code runs meanwhile.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_on:
            gc.enable()
