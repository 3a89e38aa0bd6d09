"""Imports modules that import much."""

import gc
from importlib import import_module
from types import ModuleType


def imported(name: str) -> ModuleType:
    """Import a module that imports much, without collecting garbage meanwhile.

    Nearly all objects that imports make stay. To look for garbage among them takes a quarter of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if collects:
            gc.enable()
