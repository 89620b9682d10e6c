"""Worker processes of the node: they sample, judge and keep the journal, beside the trainer."""
