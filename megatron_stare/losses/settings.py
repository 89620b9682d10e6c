"""Settings of an objective: the keyword-only arguments of its loss and of its plan.

Their defaults are the published values. A setting without a default must be given, as no value of
it is published. A value comes from the field `loss.<name>` if all objectives share the setting (or
the objective is STARE, whose settings are all fields) and it is given there, else from
`loss.settings.<name>`, else from the default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from megatron_stare.config import LossConfig, UserError, nearest
from megatron_stare.config.run import settings
from megatron_stare.config.section import (  # noqa: F401  (the types that settings have)
    REQUIRED,
    AtLeastOne,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Setting,
    Whole,
)

_PREFIX = "loss.settings."
FIELDS = frozenset(key.removeprefix("loss.") for key in settings() if key.startswith("loss."))
# The fields that only some objectives read.
_OF_ALL = {"name", "aggregation", "padded_length", "settings", "reweight"}
_OF_ALL |= {"kl_loss_coef", "kl_loss_type", "sensitivity_metrics"}
_OF_ALL |= {"distillation_coef", "distillation_top_k", "reward_coef"}
FIELD_SETTINGS = {
    key.removeprefix("loss."): setting
    for key, setting in settings().items()
    if key.startswith("loss.") and key.removeprefix("loss.") not in _OF_ALL
}
SHARED = frozenset({"eps_clip", "eps_clip_high", "eps_clip_c", "aggregation", "padded_length"})


def declared(*functions: Callable[..., Any], fields: frozenset[str] = SHARED) -> dict[str, Setting]:
    """The settings of several functions together; `fields` are set by fields of LossConfig,
    whose definition counts where a function gives no default. ValueError: two functions disagree.
    """
    found: dict[str, Setting] = {}
    for function in functions:
        hints = get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                continue
            key = f"loss.{name}" if name in fields else f"{_PREFIX}{name}"
            field = settings().get(key)
            if parameter.default is not inspect.Parameter.empty:
                setting = Setting(key, hints[name], parameter.default)
            elif field is not None and field.default is not None:
                setting = field
            else:
                setting = Setting(key, hints[name])
            if found.setdefault(name, setting) != setting:
                raise ValueError(f"{function.__name__} declares {name} otherwise than its loss")
    return found


def resolved(name: str, own: Mapping[str, Setting], config: LossConfig) -> dict[str, Any]:
    """Every declared setting's value.

    UserError: a key that the objective does not declare, a value it cannot have, or a setting that
    must be set and is not.
    """
    free = [each for each, setting in own.items() if not setting.is_field]
    for key in config.settings:
        if key in own and key not in free:
            raise UserError(f"{_PREFIX}{key} is a field of its own; write loss.{key}")
        if key not in own:
            raise UserError(f"{_PREFIX}{key} is not a setting of {name}{nearest(key, free)}")
    values = {}
    for key, setting in own.items():
        value = config.settings.get(key) if key in free else getattr(config, key)
        value = setting.default if value is None else value
        if value is REQUIRED:
            raise UserError(
                f"{name} needs {setting.key}: no value of it is published; set it "
                f"(python -m megatron_stare algorithms {name})"
            )
        values[key] = setting.checked(value)
    return values
