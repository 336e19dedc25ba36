"""A comparison of what compressed optimizers learn with what exact ones do."""
