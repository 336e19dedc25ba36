"""Optimizers: a paper's files begin with its name; what papers share is in `parts`."""
