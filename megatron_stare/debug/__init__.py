"""Tools that take a finished run apart: steps computed again, objectives compared on them."""
