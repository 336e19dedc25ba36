"""Parts of optimizers that several papers share."""
