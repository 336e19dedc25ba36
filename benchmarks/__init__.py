"""What measures: convergence and, later, kernels and networks."""
