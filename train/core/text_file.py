"""Text files that are written all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole, so that a killed process leaves the one before."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
