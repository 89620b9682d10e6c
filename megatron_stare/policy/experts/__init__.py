"""Routers of a model with experts: whose choices they make, and how evenly they deal."""
