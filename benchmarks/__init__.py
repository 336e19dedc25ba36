"""Measurements: of kernels, of BERT, of networks, of convergence."""
