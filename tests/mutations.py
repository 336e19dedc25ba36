"""Planted bugs, each of which the tests must find.

`python tests/mutations.py [names]` copies the tree to a temporary folder, plants one
bug after another there, runs the tests that should find it, and prints which did.
`--tests PATHS` runs other tests instead. The exit status is 0 if all bugs were found.
`--check` runs no test: it looks whether each bug can still be planted, its text being
in its file once.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from planted import exchanges, growth, lamb, optimizers, votes, zero_one

ROOT = pathlib.Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", ".*_cache")
SECONDS = 120  # a bug may let workers wait for each other
BUGS = (
    exchanges.BUGS
    | growth.BUGS
    | lamb.BUGS
    | optimizers.BUGS
    | votes.BUGS
    | zero_one.BUGS
)


def run_tests(folder, tests, cache, limit=SECONDS):
    """The exit status of the tests, None where they do not end, and seconds."""
    environment = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # Of a bug's programs most are those of the code without it.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Names of stages are no part of a program otherwise.
        "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",
    }
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    start = time.monotonic()
    try:
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder, env=environment, timeout=limit,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, time.monotonic() - start
    if status.returncode not in (0, 1):
        print(status.stdout.decode()[-2000:])
    return status.returncode, time.monotonic() - start


def plant(bug, folder):
    """Puts a bug into a copy of the tree; gives the file and its text before."""
    file = folder / bug.file
    text = file.read_text()
    file.write_text(text.replace(bug.old, bug.new))
    return file, text


def stale(names):
    """Those of the bugs whose text is not in its file, or is there twice."""
    found = []
    for name in names:
        bug = BUGS[name]
        file = ROOT / bug.file
        times = file.read_text().count(bug.old) if file.exists() else 0
        if times != 1 or bug.old == bug.new:
            found.append(f"{name}: {bug.file} has {times} times: {bug.old}")
    return found


def run_bugs(names, instead):
    """For each bug a verdict and seconds; a row is printed as it is known."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = pathlib.Path(temporary, "tree"), pathlib.Path(temporary, "jax")
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        wanted = [tuple(instead or BUGS[name].tests) for name in names]
        # All together, as each is a few tests of few files.
        together = list(dict.fromkeys(instead or sum(wanted, ())))
        status, seconds = run_tests(folder, together, cache, 10 * SECONDS)
        print(f"without a bug, {seconds:.0f} s", flush=True)
        if status != 0:
            raise SystemExit("these tests fail without a bug")
        for name, tests in zip(names, wanted, strict=True):
            file, text = plant(BUGS[name], folder)
            status, seconds = run_tests(folder, tests, cache)
            file.write_text(text)
            verdict = {0: "SURVIVED", 1: "killed", None: "killed, as it does not end"}
            rows.append((name, verdict.get(status, f"BROKEN ({status})"), seconds))
            print(f"{rows[-1][1]}, {seconds:.0f} s: {name}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of bugs; all without one")
    parser.add_argument("--tests", nargs="+", help="to run instead of its own")
    parser.add_argument("--check", action="store_true", help="run no test")
    arguments = parser.parse_args()
    names = arguments.names or list(BUGS)
    wrong = stale(names)
    if wrong:
        raise SystemExit("\n".join(wrong))
    if arguments.check:
        print(f"{len(names)} bugs can be planted.")
        return 0
    rows = run_bugs(names, arguments.tests)
    print()
    for name, verdict, seconds in rows:
        print(f"{name:<56} {verdict:<10} {seconds:4.0f} s")
    alive = sum(not verdict.startswith("killed") for _, verdict, _ in rows)
    print(f"{len(rows) - alive} of {len(rows)} bugs were found.")
    return alive > 0


if __name__ == "__main__":
    sys.exit(main())
