"""Every code block of the README runs as it stands."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
TARGETS = set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE))


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_block(number, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    if "print(loss" in BLOCKS[number]:
        assert float(done.stdout.split()[0]) < 0.1, "the example must learn"
        lines = BLOCKS[number].strip().splitlines()
        assert len(lines) <= 12, "the simplest use is ten lines and an import"


def test_there_are_blocks_and_their_make_targets_exist():
    assert len(BLOCKS) >= 4
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"pretrain", "test"} <= TARGETS
    for target in TARGETS:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
