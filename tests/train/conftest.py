"""Compiles each small program once, for all tests of the application."""

import jax
import pytest

OPTIONS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="package", autouse=True)
def _compiled_once(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp().parent / "compiled"
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    for name, value in (OPTIONS | {"jax_compilation_cache_dir": str(folder)}).items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
