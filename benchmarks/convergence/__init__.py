"""Whether compressed optimizers learn as their exact ones do."""
