"""The arithmetic of compression, timed."""
