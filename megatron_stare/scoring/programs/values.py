"""Values of a program, written as JSON in its process and read where the program is not.

Only plain kinds are written: None, bool, int, float, str, bytes, complex, list, tuple, set, dict.
So an object that calls itself equal to everything never meets the expected value. JSON has lists
for all but None, bool and str: [kind, content].
"""

from __future__ import annotations

import json
import math
from typing import Any

# Appended to the program; {encode} is a name that the program cannot have used. Subclasses
# (Counter, namedtuple, an enumeration of integers) and NumPy's values are written as what they are
# made of; any other iterable as its items, of which len, list and sorted can be taken.
ENCODER = """
def {encode}(value, isinstance=isinstance, list=list, str=str, repr=repr, type=type):
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, complex):
        return ["complex", complex.__repr__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    for kind, types in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, types):
            return [kind, [{encode}(one) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[{encode}(key), {encode}(one)] for key, one in dict.items(value)]]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return {encode}(value.tolist())
    try:
        return ["other", [{encode}(one) for _, one in zip(range(100000), value)]]
    except TypeError:
        return ["other", []]
"""
# For the process that compares, in which no line of the program runs.
DECODER = """
class {decode}_other(list):
    def __eq__(self, other):
        return False
    def __ne__(self, other):
        return True
    __hash__ = None

def {decode}(encoded):
    if not isinstance(encoded, list):
        return encoded
    kind, content = encoded
    if kind in ("list", "tuple", "set", "other"):
        types = {"list": list, "tuple": tuple, "set": set, "other": {decode}_other}
        return types[kind]([{decode}(one) for one in content])
    if kind == "dict":
        return {{decode}(key): {decode}(one) for key, one in content}
    if kind == "int":
        return int(content, 16)
    return {"float": float, "complex": complex, "bytes": bytes.fromhex}[kind](content)
"""


def same_json(encoded: Any, expected: Any, tolerance: float) -> bool:
    """Whether a value that ENCODER wrote equals a JSON value: a tuple is a list, a dictionary's
    keys are texts, true is not 1, 2.0 is not the integer 2. An expected float may differ by
    `tolerance`, relative and absolute. A text that ENCODER cannot have written may raise anything.
    """
    if expected is None or isinstance(expected, bool | str):
        return type(encoded) is type(expected) and bool(encoded == expected)
    if not isinstance(encoded, list):
        return False
    kind, content = encoded
    if isinstance(expected, float):
        if kind not in ("int", "float"):
            return False
        found = float(content) if kind == "float" else float(int(content, 16))
        close = math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
        return found == expected or close
    if isinstance(expected, int):
        return kind == "int" and int(content, 16) == expected
    if len(content) != len(expected):
        return False
    if isinstance(expected, list):
        pairs = zip(content, expected, strict=True)
        return kind in ("list", "tuple") and all(same_json(a, b, tolerance) for a, b in pairs)
    values = {_key(key): value for key, value in content} if kind == "dict" else {}
    return len(values) == len(expected) and all(
        key in values and same_json(values[key], value, tolerance)
        for key, value in expected.items()
    )


def _key(encoded: Any) -> str:
    """A dictionary's key as JSON writes it."""
    match encoded:
        case str():
            return encoded
        case ["int", str(digits)]:
            return str(int(digits, 16))
        case ["float", str(number)]:
            return number
    return json.dumps(encoded)
