"""Sums, scans and order statistics along sequences whose tokens lie on several ranks."""
