"""The console script `sglang-ext`: finds the subcommand's module and runs it. Imports nothing heavy itself.

A subcommand is a module with `add_arguments(parser)` and `main(args) -> int`. One with `PASSES_ON = True` also gets
`args.rest`, the arguments that are not its own, in order.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import sglang_ext

# name: (module in sglang_ext.launch, what it does)
COMMANDS = {
    "serve": ("serve", "start a server that has pools: SGLang's own, with every flag it has"),
    "pool": ("pool", "put, ls, show, append, rm, cancel, plan, sync: the pools of a server, and of folders"),
    "batch": ("batch", "answer a file of questions offline; resumes where it stopped"),
    "demo": ("demo", "one pool answered from in five ways, in one table"),
    "heads": ("heads", "find a model's retrieval heads, by which ltri votes"),
    "doctor": ("doctor", "what is installed, active, refused, and why"),
    "bench": ("bench", "measure something; see sglang-ext bench --help"),
}
BENCHMARKS = Path(__file__).parent / "bench"

_USERS = ("ServerError", "PoolError", "FailedAnswers")  # by name, so that their modules need not be imported

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def benchmarks() -> list[str]:
    """Names of the benchmarks there are: the modules in launch/bench."""
    return sorted(path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.startswith("_"))


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {words}" for name, (_, words) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="sglang-ext",
        usage="sglang-ext [--debug] COMMAND ...",
        description="Many-shot in-context learning served from SGLang's radix tree.",
        epilog=f"commands:\n{listed}\n\nsglang-ext COMMAND --help lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sglang-ext {sglang_ext.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _module(command: str, arguments: list[str]) -> tuple[ModuleType, str, list[str]]:
    """(module, name for messages, the arguments left for it)."""
    if command != "bench":
        return importlib.import_module(f"sglang_ext.launch.{COMMANDS[command][0]}"), f"sglang-ext {command}", arguments
    chooser = argparse.ArgumentParser(
        prog="sglang-ext bench", usage="sglang-ext bench NAME ...", description=f"NAME: {', '.join(benchmarks())}"
    )
    chooser.add_argument("name", choices=benchmarks(), metavar="NAME", help=argparse.SUPPRESS)
    chooser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = chooser.parse_args(arguments)
    module = importlib.import_module(f"sglang_ext.launch.bench.{chosen.name}")
    return module, f"sglang-ext bench {chosen.name}", chosen.arguments


def _parse(module: ModuleType, prog: str, arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(module.__doc__ or "").strip().replace("`", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    if not getattr(module, "PASSES_ON", False):
        return parser.parse_args(arguments)
    known, rest = parser.parse_known_args(arguments)
    known.rest = rest
    return known


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0, 1 (it failed), 2 (bad input). Errors are one plain line on stderr."""
    options = _overview().parse_args(argv)
    try:
        module, prog, arguments = _module(options.command, options.arguments)
        args = _parse(module, prog, arguments)
        status: int = module.main(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (head, say) has enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if options.debug or not _is_users(error):
            raise
        print(f"sglang-ext {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT if _is_input(error) else FAILED


def _is_users(error: Exception) -> bool:
    """Whether an error is something to tell the user, and no defect of ours."""
    return isinstance(error, (ValueError, OSError)) or type(error).__name__ in _USERS


def _is_input(error: Exception) -> bool:
    # A PoolError is a ValueError too: what a server or an engine said about a pool.
    return isinstance(error, (ValueError, FileNotFoundError)) and not hasattr(error, "status_code")


if __name__ == "__main__":
    sys.exit(main())
