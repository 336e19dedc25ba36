"""The ground of every test: eight virtual workers and strict arithmetic."""

import gc
import json
import pathlib

import hypothesis
import jax
import numpy as np

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# JAX keeps so many objects that looking for garbage took a twentieth of the time.
gc.set_threshold(20_000, 10, 10)

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
        "--implementation",
        action="append",
        help="an implementation of pallas_kernels to test, instead of those for a CPU",
    )
    parser.addoption(
        "--data-dir",
        type=pathlib.Path,
        help="folder of real texts and questions, for tests that can do without",
    )


def deepspeed_files(config, optimizer):
    folder = config.getoption("golden_dir")
    return sorted(folder.glob(f"deepspeed_{optimizer}_*.npz"))


def pytest_configure(config):
    workers = [
        json.loads(str(np.load(file)["config"]))["workers"]
        for file in deepspeed_files(config, "*")
    ]
    jax.config.update("jax_num_cpu_devices", max(8, *workers, 0))


def pytest_generate_tests(metafunc):
    # One test a file, so that a folder with more files is more tests.
    if "deepspeed_file" in metafunc.fixturenames:
        files = deepspeed_files(metafunc.config, metafunc.module.OPTIMIZER)
        metafunc.parametrize("deepspeed_file", files, ids=lambda f: f.stem)
    if "hf_bert_file" in metafunc.fixturenames:
        folder = metafunc.config.getoption("golden_dir")
        files = sorted(folder.glob("hf_bert_*_expected.npz"))
        metafunc.parametrize("hf_bert_file", files, ids=lambda f: f.stem)
