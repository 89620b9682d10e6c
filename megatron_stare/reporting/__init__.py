"""The logbook of a run, its statistics, plots and report."""
