"""The lines of SGLang that the plugin serves. `compat` has an adapter for each.

A line is a range of versions whose few differences one adapter and `hooks.py` cover. This module imports nothing of
SGLang, so that a version that we do not serve can be refused in words. The requirement in pyproject.toml takes these
lines and nothing between them, which `tests/packaging/test_distributions.py` holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version


@dataclass(frozen=True)
class Line:
    """A range of versions.

    Attributes:
        first: the first version of it.
        below: the first version above that is not of it.
        config_merger: `module:class` of SGLang's that reads a server's arguments from a file.
        arguments: the files that name all of a server's flags, as patterns below the package `sglang`.
        tried: the version of it with which all tests were run.
        on_gpus: whether GPUs have run that version, and not a CPU alone.
    """

    first: str
    below: str
    config_merger: str
    arguments: tuple[str, ...]
    tried: str
    on_gpus: bool

    def __str__(self) -> str:
        return f">={self.first},<{self.below}"


OLDER = Line(
    first="0.5.16",
    below="0.5.19",
    config_merger="sglang.srt.server_args_config_parser:ConfigArgumentMerger",
    arguments=("srt/server_args.py",),
    tried="0.5.17",
    on_gpus=True,
)
NEWER = Line(
    first="0.5.23",
    below="0.5.24",
    config_merger="sglang.srt.utils.server_args_config_parser:ConfigArgumentMerger",
    arguments=("srt/server_args.py", "srt/arg_groups/fields/*.py"),
    tried="0.5.23",
    on_gpus=False,
)
LINES = (OLDER, NEWER)


def installed_sglang() -> str:
    """Version of the installed SGLang."""
    return version("sglang")


def line_of(found: str) -> Line | None:
    """The line that a version of SGLang belongs to; None where it belongs to none."""
    from packaging.specifiers import SpecifierSet

    return next((line for line in LINES if SpecifierSet(str(line)).contains(found, prereleases=True)), None)


@cache
def current() -> Line:
    """The line of the installed SGLang; the newest one where it belongs to none, which is refused at the start."""
    return line_of(installed_sglang()) or LINES[-1]


def installed_release() -> str:
    """Release of the installed SGLang: its version without `.post1` and the like."""
    from packaging.version import Version

    return Version(installed_sglang()).base_version


def at_least(release: str) -> bool:
    """Whether the installed SGLang is of this release or a later one."""
    from packaging.version import Version

    return Version(installed_release()) >= Version(release)


def ran_on_gpus() -> bool:
    """Whether GPUs have run the plugin with the release of SGLang that is installed."""
    return current().on_gpus and installed_release() == current().tried


def warning_on_gpus() -> str | None:
    """What to tell those who run the installed SGLang on a GPU; None where GPUs have run the plugin with it."""
    if ran_on_gpus():
        return None
    tried = " or ".join(line.tried for line in LINES if line.on_gpus)
    return (
        f"no GPU has run this plugin with SGLang {installed_sglang()}, only a CPU: use SGLang {tried} on GPUs, or"
        " compare answers with those of a server of SGLang's own"
    )
