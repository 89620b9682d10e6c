"""megatron_stare: reinforcement learning with verifiable rewards on Megatron-Core,
without entropy collapse.

The names of api.py can be imported from here (__init__.pyi); they are loaded when they are used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
__all__ = ["evaluate", "generate", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("megatron_stare.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
