"""Measurements: bytes of a compiled program, replicas, metrics of a state."""
