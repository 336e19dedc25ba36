"""Exchanges and steps between hosts of a limited network."""
