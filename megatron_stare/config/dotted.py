"""What a dotted path names: the user's own functions and classes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_stare.config.errors import UserError


def callable_at(path: str, what: str, form: str) -> Callable[..., Any]:
    """The callable at package.module.name;
    UserError where there is none. `what` it is for, `form` it should have.
    """
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{what} {path!r} cannot be imported ({error}); check the path and PYTHONPATH"
        ) from None
    if not callable(found):
        raise UserError(f"{what} {path!r} is not callable; name {form}")
    return found
