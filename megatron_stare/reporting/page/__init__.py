"""The report page: data collected from runs (no HTML here), and assets/ that draw it.

runs -> figures, about -> content (one JSON tree) -> render.
"""
