"""The sdist and the wheel of `make wheel`, and the wheel installed by itself."""

import email
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest
from markdown_it import MarkdownIt
from test_readme import ROOT, blocks_of, check_first_program

PACKAGES = {"onebit_jax", "pallas_kernels", "onebit_launch"}
BARE = pathlib.Path(f"{sys.prefix}-bare", "bin")


def output_of(*command, folder):
    done = subprocess.run(
        command, cwd=folder, env={"PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_its_dependencies_come_with_it(tmp_path):
    code = "import importlib.metadata as m; print(*m.packages_distributions())"
    found = set(output_of(BARE / "python", "-c", code, folder=tmp_path).split())
    assert PACKAGES | {"jax", "optax"} <= found
    assert not {"flax", "jaxtyping", "tests", "train", "models", "benchmarks"} & found


def test_the_first_program_of_the_readme_runs(tmp_path):
    program, *_ = blocks_of("README.md")
    check_first_program(output_of(BARE / "python", "-c", program, folder=tmp_path))


def test_the_launcher_is_a_command(tmp_path):
    said = output_of(BARE / "onebit-launch", "--help", folder=tmp_path)
    assert said.startswith("usage: onebit-launch --processes N")


@pytest.mark.parametrize(("step", "mistakes"), [("50", []), ('"soon"', [3])])
def test_a_program_that_uses_it_is_type_checked(step, mistakes, tmp_path):
    (tmp_path / "program.py").write_text(
        "import onebit_jax\n"
        'exchange: onebit_jax.Exchange = onebit_jax.sign_mean("data")\n'
        f"tx = onebit_jax.onebit_adam(1e-3, exchange, onebit_jax.freeze_at({step}))\n"
    )
    # Strictly, so that anything without a type is a mistake.
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pyright", "--outputjson"),
            *("--pythonpath", BARE / "python", "--project", tmp_path),
        ],
        env={name: os.environ[name] for name in os.environ if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [x["range"]["start"]["line"] + 1 for x in found] == mistakes, found


def test_a_registry_shows_a_page_that_needs_no_file_beside_it():
    (wheel,) = (ROOT / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(files.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload(decode=True).decode()
    blocks = MarkdownIt("commonmark").enable("table").parse(page)
    tokens = [token for block in blocks for token in block.children or ()]
    places = [token.attrs.get("href") or token.attrs.get("src") for token in tokens]
    assert all(place.startswith("https://") for place in places if place)
    assert "`docs/first-script.md`" in page
    assert "\npip install 'onebit-jax' " in page
    assert "from a clone: jax" not in page


def test_both_hold_the_library_alone():
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    with tarfile.open(sdist) as files:
        assert {name.split("/")[1] for name in files.getnames()} == {
            *PACKAGES,
            *("README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"),
        }
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == PACKAGES
