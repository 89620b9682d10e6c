"""The report page: data collected from runs (no HTML here), and assets/ that draw it.

runs -> series, figures, inside -> content (one JSON tree) -> render.
"""
