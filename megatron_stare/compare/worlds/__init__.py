"""The data and models that the quickstarts make for themselves."""
