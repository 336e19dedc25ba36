"""The recipe for other devices runs; `test_command` runs the script that is fed."""

import re

from test_readme import ROOT, output_of

PAGE = (ROOT / "docs" / "multi-host.md").read_text(encoding="utf-8")
(RESIZED,) = re.findall(
    r"^```python\n(import tempfile.*?)^```", PAGE, re.DOTALL | re.MULTILINE
)


def test_a_checkpoint_of_other_devices_is_gone_on_with(tmp_path):
    printed = output_of(RESIZED, tmp_path)
    assert "'count': Array(40" in printed
    assert "'frozen_at': Array(5" in printed
