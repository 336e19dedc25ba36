"""The models that a cluster is planned for: BERT's sizes, and the same much larger."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import models

SIZES = MappingProxyType(
    {
        **models.SIZES,
        "7b": replace(
            models.SIZES["large"],
            hidden_size=5120,
            num_layers=25,
            num_heads=40,
            intermediate_size=16384,
        ),
    }
)
"""The sizes by the names that `--model` takes."""
