"""The parts of every section of the configuration: a frozen pydantic dataclass, and types.

A field is one definition: its type with range or choices, its default, and the sentence under it.
Error messages, `config`, docs/configuration.md, the JSON Schema and shell completion are all made
from these definitions (config/settings.py). `dataclasses.replace` validates the changed field.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, cast, dataclass_transform

import pydantic.dataclasses
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, Strict, ValidationError

from megatron_stare.config.errors import UserError

_OPTIONS = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    use_attribute_docstrings=True,
)

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
