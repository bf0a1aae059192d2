"""Stand-ins for packages that SGLang imports wherever it runs and that have no part in these tests:
Triton, whose wheel takes 1 GB and whose kernels need a GPU, and torchvision, which wants a build
that fits torch's.

To be imported before SGLang. A name of them is a class or a call that does nothing.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final
from unittest.mock import MagicMock

_ABSENT: Final = frozenset({"torchvision", "triton"})


class _Kind(type):
    """Of stand-in classes: what they are asked for is there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _StandIn(ModuleType):
    __version__ = "0"
    __path__: list[str] = []  # noqa: RUF012  (a package has one of its own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Of classes others are derived, and isinstance asks for them.
        found = _Kind(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


# Last, so that a package that is there is used.
sys.meta_path.append(_Finder())
