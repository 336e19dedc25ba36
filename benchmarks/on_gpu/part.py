"""The process of one part: its JSON, its device.

    python -m benchmarks.on_gpu.part NAME FOLDER TINY

TINY is empty for full sizes.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.core.text_file import replace_text

if TYPE_CHECKING:
    from benchmarks.on_gpu.sizes import Sizes


class Record:
    """The results of a part, written the moment that they are known.

    Args:
      file: The JSON.
    """

    def __init__(self, file: Path):
        self.file = file
        self.values: dict[str, Any] = {}

    def write(self, **values: Any) -> None:
        """Adds values."""
        self.values |= values
        write(self.file, self.values)

    def device(self, sizes: Sizes) -> Any:
        """The device that is measured.

        Raises:
          SystemExit: It is not of the platform that the sizes are for, or of another
            kind than the one that the folder's results are of.
        """
        import jax

        found, folder = jax.devices()[0], self.file.parent
        if found.platform != sizes.platform:
            raise SystemExit(
                f"JAX sees no {sizes.platform} but {found.platform}: install "
                "jax[cuda13], or give --tiny on a CPU."
            )
        earlier = read(folder, "facts").get("device_kind", found.device_kind)
        if found.device_kind != earlier:
            raise SystemExit(
                f"{folder} holds what was found on {earlier}, and this is "
                f"{found.device_kind}: give --out another folder."
            )
        return found


def write(file: Path, values: dict[str, Any]) -> None:
    """Writes a JSON, whole or not at all."""
    replace_text(file, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def read(folder: Path, part: str) -> dict[str, Any]:
    """The results of a part of a run's folder; none where it has not run."""
    file = folder / f"{part}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def main() -> None:
    """Measures a part."""
    name, folder, tiny = sys.argv[1:]
    from benchmarks.on_gpu.sizes import SIZES, TINY

    part = importlib.import_module(f"benchmarks.on_gpu.{name}")
    part.measure(TINY if tiny else SIZES, Record(Path(folder, f"{name}.json")))


if __name__ == "__main__":
    main()
