"""True values for Triton kernels: compiled for the device and launched, then interpreted on the
CPU over the same memory, program by program.

A kernel of which an argument has more than LIMIT elements, or whose grid has more than PROGRAMS
programs, is launched only.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tools.nullcuda.memory import LIMIT, aliases, on_device
from tools.nullcuda.values import not_computed

PROGRAMS = 1 << 14
COMPUTED_ELSEWHERE: set[str] = set()  # kernels whose callers compute: project.py
_interpreting = threading.local()
_scopes: list[Any] = []


def install(module: ModuleType) -> None:
    """Around each launch of `triton.runtime.jit`, and each choice of `triton.runtime.autotuner`."""
    if hasattr(module, "Autotuner"):
        module.Autotuner.do_bench = property(lambda tuner: _launched_once)
        return
    launch = module.JITFunction.run

    @functools.wraps(launch)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        done = launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        tried = getattr(_interpreting, "tried", False)
        if not (warmup or tried or self.__name__ in COMPUTED_ELSEWHERE):
            _interpret(self, args, grid, kwargs)
        return done

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A kernel's call of a function: outside a kernel Triton refuses it."""
        if not getattr(_interpreting, "on", False):
            raise RuntimeError(f"{self.__name__}: a Triton function is called by kernels only")
        function, outer = _function(self.fn), len(_scopes)
        try:
            return function(*args, **kwargs)
        finally:  # the interpreter itself leaves what it changed for a function, for good
            while len(_scopes) > outer:
                _scopes.pop().restore()

    module.JITFunction.run = run
    module.JITFunction.__call__ = call


def _launched_once(call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
    """Milliseconds of one of a kernel's configurations: compiled and launched, and as fast as all
    others, so that the first is taken.
    """
    _interpreting.tried = True
    try:
        call()
    finally:
        _interpreting.tried = False
    return [0.01] * len(quantiles)


@functools.cache
def _function(function: Any) -> Any:
    return _interpreter().InterpretedFunction(function)


@functools.cache
def _interpreter() -> ModuleType:
    """Triton's, whose changes to triton.language are noted in _scopes."""
    from triton.runtime import interpreter

    change = interpreter._patch_lang

    def noted(function: Any) -> Any:
        _scopes.append(change(function))
        return _scopes[-1]

    interpreter._patch_lang = noted
    return interpreter


def _interpret(kernel: Any, args: Any, grid: Any, kwargs: Any) -> None:
    tensors = [value for value in (*args, *kwargs.values()) if on_device(value)]
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    programs = math.prod(grid(bound) if callable(grid) else grid)
    if any(tensor.numel() > LIMIT for tensor in tensors) or programs > PROGRAMS:
        return
    _interpreting.on = True
    try:
        _function(kernel.fn).run(*aliases(args), grid=grid, warmup=False, **aliases(kwargs))
    except Exception as error:  # the interpreter wraps whatever numpy says
        not_computed[kernel.__name__, str(error)[:120]] += 1
    finally:
        _interpreting.on = False
        _scopes.clear()  # the kernel's own was taken back by who interpreted it
