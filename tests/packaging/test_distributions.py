"""What is in the wheel and in the source distribution."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "policies", "retrievers", "launch")


def package_sources() -> set[str]:
    """Every module of the package and every data file it ships, by its name inside a distribution."""
    files: set[str] = set()
    for folder, name in [(ROOT / "sglang_ext", "sglang_ext")] + [(ROOT / f, f"sglang_ext/{f}") for f in LINKED]:
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            if name == "sglang_ext" and inside.parts[0] in LINKED:
                continue
            code = path.suffix in (".py", ".cu", ".cuh")
            shipped = code or inside.parts[0] == "assets" or inside.parts[:2] == ("bench", "results")
            if path.is_file() and shipped and "__pycache__" not in inside.parts:
                files.add(f"{name}/{inside.as_posix()}")
    return files | {"sglang_ext/py.typed"}


class Built(NamedTuple):
    """A wheel, and the names of the files in it and in the sdist (less the sdist's top folder)."""

    wheel: Path
    in_wheel: set[str]
    in_sdist: set[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both distributions, from a copy of the checkout; the wheel is built from the sdist, as installers may do."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "source"
    skip = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", "build", "dist", ".*_cache", ".refdata")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skip)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "out"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    wheel, sdist = next((folder / "out").glob("*.whl")), next((folder / "out").glob("*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as tar:
        in_sdist = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    return Built(wheel, in_wheel, in_sdist)


def test_wheel_holds_the_whole_package(built: Built) -> None:
    wheel = built.in_wheel
    expected = package_sources()
    assert "sglang_ext/kernels/view_attention/reference.py" in expected
    assert "sglang_ext/assets/reference/model.safetensors" in expected
    assert expected - wheel == set()


def test_wheel_holds_nothing_else(built: Built) -> None:
    wheel = built.in_wheel
    tops = {name.split("/", 1)[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sglang_ext"}
    assert not [name for name in wheel if "/tests/" in name or "__pycache__" in name]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_sdist_can_be_built_from(built: Built) -> None:
    sdist = built.in_sdist  # that a wheel can be built from it, the fixture shows
    assert {"pyproject.toml", "README.md", "LICENSE"} <= sdist
    assert package_sources() - sdist == set()


def test_wheel_works_where_the_repository_is_not(built: Built, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sglang_ext; from sglang_ext.launch import demo; import sglang_ext.kernels.view_attention.reference;"
        "assert (demo.REFERENCE_MODEL / 'model.safetensors').is_file(), demo.REFERENCE_MODEL;"
        "print(sglang_ext.__file__)"
    )
    # -c puts the working folder first on the path, before an editable installation.
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
