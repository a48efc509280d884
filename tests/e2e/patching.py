"""A `sitecustomize.py` that patches one of SGLang's modules as soon as a server has imported it.

On the CPU such a server's other processes are forked from its first one (`tests.e2e.forked`), which takes a third of
the time.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch

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
_FORKING = """
sys.path.append({root!r})
from tests.e2e.warm import forked_children

forked_children()
"""


def sitecustomize(name: str, patch: str) -> str:
    """The file's text.

    Args:
        name: of the module.
        patch: what is done with `module`; it may use `os`.
    """
    code = _CODE.format(name=name, patch=textwrap.indent(textwrap.dedent(patch).strip("\n"), "    "))
    root = str(Path(__file__).resolve().parents[2])
    return code if torch.cuda.is_available() else code + _FORKING.format(root=root)
