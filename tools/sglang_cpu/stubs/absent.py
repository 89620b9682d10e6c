"""Modules whose every name imports and none works:
what a package that is not installed leaves behind.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable
from types import ModuleType


class Absent:
    """A function or class that is not here:
    it can be named, imported and looked into, but not called.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            f"{self.__name__} was called, and tools/sglang_cpu has only a stand-in for it"
        )


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the submodules `names` of `package`, or all of them,
    and fills them with Absent names.
    """

    def __init__(self, package: str, names: Iterable[str] = ()) -> None:
        self.package, self.names = package, tuple(names)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != self.package or (self.names and rest.split(".")[0] not in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None  # Python makes an ordinary module

    def exec_module(self, module: ModuleType) -> None:
        fill(module)


def fill(module: ModuleType) -> None:
    """Give the module a value for every name it is asked for."""

    def found(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module.__name__}.{name}")

    module.__getattr__ = found  # type: ignore[method-assign]


def install(package: str, names: Iterable[str] = ()) -> None:
    """Make `package`, now being imported, such a module, and its submodules too."""
    fill(sys.modules[package])
    sys.meta_path.append(AbsentModules(package, names))
