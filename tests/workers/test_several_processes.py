"""Workers of several processes train as those of one."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
from virtual_workers import mesh_of
from workers import two_workers

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = pathlib.Path(two_workers.__file__)


def test_two_processes_train_as_two_workers_of_one(tmp_path):
    """By counts, with leaves of every size, measuring the growth, under a guard."""
    file = tmp_path / "params.npz"
    launcher = [sys.executable, "-m", "onebit_launch", "--processes", "2", "--"]
    done = subprocess.run(
        [*launcher, SCRIPT, file],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    params, steps = jax.device_get(two_workers.trained(mesh_of(2)))
    assert steps == {"warmup": 2, "compressed/measuring": 4, "compressed": 4}
    with np.load(file) as found:
        for name, expected in params.items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-7)
