"""A run that hangs says where, and ends: what each rank does, who stands still, the report."""
