"""What is in the wheel and in the source distribution."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from sglang_ext import lines

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
    made = (".git", ".venv*", "*.egg-info", "__pycache__", "build", "dist", ".*_cache", ".refdata")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*made))
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


# Every release of SGLang that could be, near those that we serve; some are followed by one that mends them.
RELEASES = [f"0.5.{patch}{mended}" for patch in range(100) for mended in ("", ".post1")] + ["0.4.17", "0.6.0", "1.5.23"]


def needs_of(wheel: Path) -> list[Requirement]:
    """What the wheel needs beside its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        listed = HeaderParser().parsestr(archive.read(name).decode("utf-8")).get_all("Requires-Dist", [])
    return [need for need in map(Requirement, listed) if need.marker is None]


def test_pip_takes_the_lines_of_sglang_that_the_plugin_takes(built: Built) -> None:
    (wanted,) = [need for need in needs_of(built.wheel) if need.name == "sglang"]
    taken = [release for release in RELEASES if release in wanted.specifier]
    assert taken == [release for release in RELEASES if lines.line_of(release) is not None]
    assert {lines.line_of(release) for release in taken} == set(lines.LINES)
    assert all(lines.line_of(f"{line.below}rc1") is None for line in lines.LINES), "it is of the next release"


def test_pip_keeps_the_sglang_that_is_installed(built: Built, tmp_path: Path) -> None:
    """Without an index: pip would fail if it wanted another version of SGLang, or anything else that is not there."""
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index", "--quiet"]
    done = subprocess.run([*command, "--report", "-", str(built.wheel)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each["metadata"]["name"] for each in json.loads(done.stdout)["install"]] == ["sglang-ext"]
