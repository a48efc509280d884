"""The repository's layout: four linked folders, nothing that shadows Hugging Face's ``kernels``, no one's own paths."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "policies", "retrievers", "launch")

# Absolute paths of one machine. Made-up ones in documentation are /path/to/...
OWN_PATHS = re.compile(rb"(?<![\w.])/(?:work|home|root|Users)/[\w.-]+|\$OUT\b")
BINARY = {".safetensors", ".gz", ".png"}


def git(*arguments: str) -> str:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing is tracked")
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("folder", LINKED)
def test_the_code_folders_are_real_and_linked_into_the_package(folder: str) -> None:
    link = ROOT / "sglang_ext" / folder
    assert link.is_symlink() and link.readlink() == Path("..") / folder
    assert (ROOT / folder).is_dir() and not (ROOT / folder).is_symlink()
    assert git("ls-files", "--stage", f"sglang_ext/{folder}").split()[0] == "120000"


@pytest.mark.parametrize("folder", LINKED)
def test_the_code_folders_are_not_packages_of_their_own(folder: str) -> None:
    # With an __init__.py, `import kernels` in the repository's root would find ours.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("place", [ROOT, Path("/")])
def test_import_kernels_is_hugging_faces(place: Path) -> None:
    code = "import kernels; print(kernels.__file__); kernels.get_kernel"
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "site-packages" in done.stdout and str(ROOT / "kernels") not in done.stdout


@pytest.mark.parametrize("folder", LINKED)
def test_the_code_folders_import_under_the_package(folder: str) -> None:
    module = {
        "kernels": "view_attention",
        "policies": "dbsa",
        "retrievers": "registry",
        "launch": "demo_data",
    }[folder]
    code = f"import sglang_ext.{folder}.{module} as m; print(m.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tests_hold_no_init_files() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms", "console_scripts"])
def test_entry_points_resolve(group: str) -> None:
    from sglang.srt.platforms import current_platform

    assert current_platform.device_name  # SGLang's first use loads the platform; ours must not be half loaded then
    ours = [point for point in entry_points(group=group) if point.value.startswith("sglang_ext.")]
    assert ours, f"no entry point of sglang_ext in {group}: install the package (make env)"
    for point in ours:
        assert callable(point.load())


def test_no_tracked_file_names_somebodys_own_folders() -> None:
    found = []
    for name in git("ls-files", "-z").split("\0"):
        path = ROOT / name
        if not name or path.is_symlink() or not path.is_file() or path.suffix in BINARY or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if OWN_PATHS.search(line):
                found.append(f"{name}:{number}: {line[:120].decode(errors='replace')}")
    assert found == []


def test_version_is_the_same_everywhere() -> None:
    import sglang_ext

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{sglang_ext.__version__}"' in text
    assert f"## [{sglang_ext.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
