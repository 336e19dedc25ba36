"""Exchanges: from each worker's own tree to the tree that all agree on."""
