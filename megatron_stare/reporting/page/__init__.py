"""The report's page: what is gathered of runs (no HTML here), and assets/ that draw it.

runs -> series, figures, inside, conversations, faults -> content (one JSON tree) -> render.
"""
