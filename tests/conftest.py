"""The ground of every test: eight virtual workers and strict arithmetic."""

import json
import pathlib

import hypothesis
import jax
import numpy as np

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "quick", max_examples=12, deadline=None, print_blob=True
)
hypothesis.settings.register_profile(
    "thorough", max_examples=150, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("quick")


def pytest_addoption(parser):
    parser.addoption(
        "--golden-dir",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parent / "golden",
        help="folder of other implementations' numbers",
    )
    parser.addoption(
        "--data-dir",
        type=pathlib.Path,
        help="folder of real texts and questions, for tests that can do without",
    )


# For each fixture the files that it is one of.
GOLDEN = {
    "deepspeed_file": "deepspeed_onebit_adam_*.npz",
    "zero_one_file": "deepspeed_zero_one_adam_*.npz",
    "hf_bert_file": "hf_bert_*_expected.npz",
}


def golden_files(config, pattern):
    return sorted(config.getoption("golden_dir").glob(pattern))


def pytest_configure(config):
    workers = [
        json.loads(str(np.load(file)["config"]))["workers"]
        for file in golden_files(config, "deepspeed_*.npz")
    ]
    jax.config.update("jax_num_cpu_devices", max(8, *workers, 0))


def pytest_generate_tests(metafunc):
    # One test a file, so that a folder with more files is more tests.
    for fixture in GOLDEN.keys() & set(metafunc.fixturenames):
        files = golden_files(metafunc.config, GOLDEN[fixture])
        metafunc.parametrize(fixture, files, ids=lambda f: f.stem)
