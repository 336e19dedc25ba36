"""BERT's step: speed, memory, kernels."""
