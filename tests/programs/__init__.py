"""Small programs for the tests, found by themselves: a decorated function in any file here is one more program.

Sizes are tiny and different along every axis, so that two axes that are swapped show at once.
"""

import importlib
import pkgutil

from tests.programs.registry import PROGRAMS, Draw, Program, program

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")

__all__ = ["PROGRAMS", "Draw", "Program", "program"]
