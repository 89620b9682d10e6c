"""Is a program right? Its tests decide."""
