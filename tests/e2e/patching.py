"""A `sitecustomize.py` that patches one of SGLang's modules as soon as a server has imported it."""

from __future__ import annotations

import textwrap

_CODE = '''
import importlib.abc
import importlib.machinery
import os
import sys


def patch(module):
{patch}


class Finder(importlib.abc.MetaPathFinder):
    """Loads the module as it is, then patches it."""

    def find_spec(self, name, path=None, target=None):
        if name != {name!r}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
'''


def sitecustomize(name: str, patch: str) -> str:
    """The file's text.

    Args:
        name: of the module.
        patch: what is done with `module`; it may use `os`.
    """
    return _CODE.format(name=name, patch=textwrap.indent(textwrap.dedent(patch).strip("\n"), "    "))
