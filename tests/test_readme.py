"""Every code block of the README and of the pages runs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    "README.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]


def blocks_of(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


BLOCKS = {(p, i): block for p in PAGES for i, block in enumerate(blocks_of(p))}
# Compiling takes longer than running: programs are compiled as the tests are.
COMPILING = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
BARE = {"PYTHONPATH": str(ROOT), "PATH": ""} | {
    name: os.environ[name] for name in COMPILING if name in os.environ
}
TARGETS = set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE))


def printed_by(*arguments):
    """The output of a program, run by itself with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env=BARE,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def output_of(block, folder):
    """The output of a block of a page."""
    script = folder / "block.py"
    script.write_text(block, encoding="utf-8")
    return printed_by(script)


def check_first_program(printed):
    rows = [line.split() for line in printed.splitlines()]
    assert all(float(loss) < 0.1 for loss, *_ in rows), "the example must learn"
    sent = {stage: int(number) for _, stage, number, *_ in rows}
    assert sent["warmup"] > 30 * sent["compressed"]


@pytest.mark.parametrize("place", BLOCKS, ids=str)
def test_python_block(place, tmp_path):
    printed = output_of(BLOCKS[place], tmp_path)
    if place == ("README.md", 0):
        check_first_program(printed)
        lines = BLOCKS[place].strip().splitlines()
        assert len(lines) <= 14, "the simplest use is an import and a dozen lines"


def test_there_are_blocks_and_their_make_targets_exist():
    assert len(BLOCKS) >= 20
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"pretrain", "test"} <= TARGETS
    for target in TARGETS:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
