"""Processes that train together: their start, and their end when one is lost."""
