"""The content of a report page, collected from runs as one tree, and the assets/ that draw it."""
