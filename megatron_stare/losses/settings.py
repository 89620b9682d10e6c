"""What an objective can be told: the keyword-only arguments of its loss and of its plan.

Their defaults are the published values. One without a default must be set, as no value of it has
been published. Where a value comes from: the field `loss.<name>` if all objectives share it (or the
objective is STARE, whose settings are all fields) and it is set, else `loss.settings.<name>`, else
the default.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_stare.config import LossConfig, UserError, nearest


@dataclass(frozen=True)
class Range:
    """low <= value <= high; without its ends where `open`."""

    low: float
    high: float = math.inf
    open: bool = False

    def holds(self, value: float) -> bool:
        if self.open:
            return self.low < value < self.high
        return self.low <= value <= self.high

    def __str__(self) -> str:
        left, right = "()" if self.open else "[]"
        return f"{left}{self.low:g}, {self.high:g}{right}"


Share = Annotated[float, Range(0, 1)]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, open=True)]
Count = Annotated[int, Range(1)]

REQUIRED = object()
FIELDS = frozenset(field.name for field in dataclasses.fields(LossConfig))
SHARED = frozenset({"eps_clip", "eps_clip_high", "eps_clip_c", "aggregation", "padded_length"})


@dataclass(frozen=True)
class Setting:
    """One declared setting: `kind` bool, int, float or str; `choices` of a str; `field` of
    LossConfig, or a key of its `settings`.
    """

    name: str
    kind: type
    default: Any = REQUIRED
    optional: bool = False
    range: Range | None = None
    choices: tuple[str, ...] = ()
    field: bool = False

    @property
    def key(self) -> str:
        """Its name in a configuration."""
        return f"loss.{self.name}" if self.field else f"loss.settings.{self.name}"

    def checked(self, value: Any) -> Any:
        """The value as its kind. UserError names the key, the value and what it may be."""
        kind: Any = self.kind
        if value is None and self.optional:
            return None
        wrong = isinstance(value, bool) != (self.kind is bool)
        if self.kind is float and isinstance(value, int) and not wrong:
            value = float(value)
        if wrong or not isinstance(value, kind):
            raise UserError(f"{self.key}={value!r} is no {self.kind.__name__}{self._default}")
        if self.choices and value not in self.choices:
            raise UserError(f"{self.key}={value!r} is not one of {', '.join(self.choices)}")
        if self.kind in (int, float) and not self._in_range(float(value)):
            raise UserError(
                f"{self.key}={value!r} is out of range; it must be finite and lie in "
                f"{self.range or Range(-math.inf)}{self._default}"
            )
        return value

    def _in_range(self, value: float) -> bool:
        return math.isfinite(value) and (self.range is None or self.range.holds(value))

    @property
    def _default(self) -> str:
        return "" if self.default is REQUIRED else f"; the default is {self.default!r}"


def declared(*functions: Callable[..., Any], fields: frozenset[str] = SHARED) -> dict[str, Setting]:
    """The settings of several functions together; `fields` are set by fields of LossConfig.
    ValueError: two disagree on one.
    """
    found: dict[str, Setting] = {}
    for function in functions:
        hints = get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                continue
            setting = _setting(name, hints[name], parameter.default, name in fields)
            if found.setdefault(name, setting) != setting:
                raise ValueError(f"{function.__name__} declares {name} otherwise than its loss")
    return found


def resolved(name: str, settings: Mapping[str, Setting], config: LossConfig) -> dict[str, Any]:
    """Every declared setting's value.

    UserError: a key that the objective does not declare, a value it cannot have, or a setting that
    must be set and is not.
    """
    for key in config.settings:
        if key in settings and settings[key].field:
            raise UserError(f"loss.settings.{key} is a field of its own; write loss.{key}")
        if key not in settings:
            own = [other for other, setting in settings.items() if not setting.field]
            raise UserError(f"loss.settings.{key} is no setting of {name}{nearest(key, own)}")
    values = {}
    for key, setting in settings.items():
        value = getattr(config, key) if setting.field else config.settings.get(key)
        value = setting.default if value is None else value
        if value is REQUIRED:
            raise UserError(
                f"{name} needs {setting.key}: no value of it is published; set it "
                f"(python -m megatron_stare algorithms {name})"
            )
        values[key] = setting.checked(value)
    return values


def _setting(name: str, hint: Any, default: Any, field: bool) -> Setting:
    default = REQUIRED if default is inspect.Parameter.empty else default
    optional, bounds, choices = False, None, ()
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not type(None))
        optional = True
    if get_origin(hint) is Annotated:
        hint, bounds = get_args(hint)
    if get_origin(hint) is Literal:
        hint, choices = str, get_args(hint)
    return Setting(name, hint, default, optional, bounds, choices, field)
