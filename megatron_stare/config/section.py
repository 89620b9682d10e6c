"""The parts of every section of the configuration: a frozen pydantic dataclass, types, settings.

A field is one definition: its type with range or choices, its default, and the sentence under it.
Error messages, `config`, docs/configuration.md, the JSON Schema and shell completion are all made
from these definitions, by `Setting`. `dataclasses.replace` validates the changed field.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, cast, dataclass_transform

import pydantic.dataclasses
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_stare.config.errors import UserError

_OPTIONS = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    use_attribute_docstrings=True,
)

REQUIRED = object()  # the default of a setting that has none
# Numbers of a configuration: finite, and never made from text or from true and false.
Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Whole = Annotated[Integer, Ge(0)]
Count = Annotated[Integer, Ge(1)]
NonNegative = Annotated[Number, Ge(0)]
Positive = Annotated[Number, Gt(0)]
AtLeastOne = Annotated[Number, Ge(1)]
Fraction = Annotated[Number, Ge(0), Le(1)]
PositiveFraction = Annotated[Number, Gt(0), Le(1)]
Momentum = Annotated[Number, Ge(0), Lt(1)]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
def section[Kind](kind: type[Kind]) -> type[Kind]:
    """The class as a frozen dataclass whose fields are validated when it is made: UserError."""
    made = pydantic.dataclasses.dataclass(frozen=True, config=_OPTIONS)(kind)
    validated = made.__init__

    @functools.wraps(validated)
    def checked(self: Any, *values: Any, **fields: Any) -> None:
        try:
            validated(self, *values, **fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, (kind.__name__, *first["loc"])))
            raise UserError(f"{place}={first['input']!r} is refused: {first['msg']}") from None

    made.__init__ = checked  # type: ignore[method-assign]
    return cast(type[Kind], made)


@dataclass(frozen=True)
class Setting:
    """One setting: its dotted key, its annotated type, its default and its sentence."""

    key: str
    hint: Any
    default: Any = REQUIRED
    description: str = ""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def is_field(self) -> bool:
        """Whether a section has a field of this name; else its `settings` have a key."""
        return ".settings." not in self.key

    @functools.cached_property
    def kind(self) -> Any:
        """The type without ranges, choices and None."""
        return _taken_apart(self.hint)[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def type_name(self) -> str:
        """The type as Python writes it, e.g. `float` or `list[str]`."""
        return "str" if self.choices else _type_name(self.kind)

    @property
    def interval(self) -> str:
        """The range in brackets, e.g. `(0, 1]`; empty if there is none."""
        low, high, bounds = "(-inf", "inf)", _taken_apart(self.hint)[1]
        for bound in bounds:
            match bound:
                case Ge(ge=edge):
                    low = f"[{edge:g}"
                case Gt(gt=edge):
                    low = f"({edge:g}"
                case Le(le=edge):
                    high = f"{edge:g}]"
                case Lt(lt=edge):
                    high = f"{edge:g})"
        return f"{low}, {high}" if bounds else ""

    @property
    def values(self) -> str:
        """The choices, the range or the type, for tables."""
        if self.choices:
            return " | ".join(self.choices)
        return f"{self.type_name} in {self.interval}" if self.interval else self.type_name

    def checked(self, value: Any) -> Any:
        """The value as the setting's type; UserError names the key, the value and the remedy."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise UserError(self.refusal(error.errors()[0]["input"])) from None

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.hint, config=ConfigDict(allow_inf_nan=False))

    def refusal(self, value: Any) -> str:
        """The message for a value that the setting cannot have."""
        text = f"{self.key}={written(value)}"
        default = "" if self.default is REQUIRED else f"; the default is {written(self.default)}"
        if self.choices:
            return f"{text} is not one of {', '.join(self.choices)}{default}"
        if isinstance(value, int | float) and self._is_number(value):
            allowed = f"lie in {self.interval}" if self.interval else "be a finite number"
            return f"{text} is out of range; it must {allowed}{default}"
        return f"{text} is not of type {self.type_name}{self._form(value) or default}"

    def _form(self, value: Any) -> str:
        """The spelling of a list or mapping, with this value if it fits."""
        container = typing.get_origin(self.kind)
        if container not in (list, dict):
            return ""
        items = [item.strip() for item in value.split(",")] if isinstance(value, str) else []
        if container is list:
            return f"; write '[{', '.join(items) or 'one, two'}]'"
        pairs = [re.split(r"\s*[:=]\s*", item, maxsplit=1) for item in items]
        whole = pairs and all(len(pair) == 2 for pair in pairs)
        named = ", ".join(": ".join(pair) for pair in pairs) if whole else "name: value"
        return f"; write '{{{named}}}'"

    def _is_number(self, value: float) -> bool:
        """Whether the value has this setting's type, so that its size is what is wrong with it."""
        return type(value) is self.kind or (type(value) is int and self.kind is float)


def written(value: Any) -> str:
    """A value as an override writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) and value else repr(value)


def fields_of(kind: Any) -> dict[str, FieldInfo]:
    """The fields of a section, as pydantic describes them."""
    found: dict[str, FieldInfo] = kind.__pydantic_fields__
    return found


def setting_of(key: str, field: FieldInfo) -> Setting:
    """The setting that a section's field defines."""
    hint: Any = field.annotation
    for each in field.metadata:
        hint = typing.Annotated[hint, each]
    default = field.get_default(call_default_factory=True)
    return Setting(key, hint, default, " ".join((field.description or "").split()))


def _type_name(hint: Any) -> str:
    kind, _ = _taken_apart(hint)
    if typing.get_origin(kind) is Literal:
        return " | ".join(typing.get_args(kind))
    parts = ", ".join(_type_name(each) for each in typing.get_args(kind))
    return f"{kind.__name__}[{parts}]" if parts else str(kind.__name__)


def _taken_apart(hint: Any) -> tuple[Any, list[Any]]:
    """The plain type of an annotation, and its bounds."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, []
    kind, *metadata = typing.get_args(hint)
    return kind, [each for each in metadata if isinstance(each, Ge | Gt | Le | Lt)]
