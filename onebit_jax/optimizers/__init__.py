"""Optimizers, one file a paper, and the parts that papers share."""
