"""SGLang's own server, with pools.

sglang-ext serve [MODEL] [--pool-dir DIR] [--policy JSON] [limits] [any flag of sglang.launch_server]

MODEL comes first: a folder or a name on the Hugging Face hub; left out, it is the small model that comes with this
package. The attention backend, the radix cache and what else pools need are set unless you set them; every other flag
goes to SGLang unchanged (python -m sglang.launch_server --help lists them).
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
from collections.abc import Sequence
from pathlib import Path

import sglang_ext
from sglang_ext import lines
from sglang_ext.config import POLICY_ENV
from sglang_ext.launch import early
from sglang_ext.launch.options import add_flags, given
from sglang_ext.settings import POOL_DIR_ENV, SETTINGS_ENV, ServerSettings, settings_with
from sglang_ext.types import JsonObject, Options

PASSES_ON = True
REFERENCE_MODEL = Path(sglang_ext.__file__).parent / "assets" / "reference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sglang-ext serve`."""
    parser.usage = "sglang-ext serve [MODEL] [--pool-dir DIR] [--policy JSON] [limits] [SGLang's flags]"
    add_pool_dir(parser)
    parser.add_argument(
        "--policy",
        metavar="JSON",
        help="options of the policy that --attention-backend names, as a JSON object",
    )
    add_flags(parser, ServerSettings, f"limits, and what clients may see (before {SETTINGS_ENV} in the environment)")


def add_pool_dir(parser: argparse.ArgumentParser) -> None:
    """--pool-dir."""
    parser.add_argument("--pool-dir", metavar="DIR", help="keep pools in this folder, and serve those found there")


def load_plugin() -> None:
    """Load SGLang's plugins in this process, ours among them.

    Raises:
        ValueError: ours was not loaded, so that SGLang would serve without pools.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins

    from sglang_ext.config import ATTENTION_BACKEND

    load_plugins()
    if ATTENTION_BACKEND not in ATTENTION_BACKENDS:
        raise ValueError("SGLang did not load the plugin sglang_ext; sglang-ext doctor says why")


def given_flags(argv: Sequence[str]) -> JsonObject:
    """The SGLang arguments that a command line sets, by their names in ServerArgs; defaults are left out.

    Raises:
        ValueError: there is something that is no SGLang flag.
    """
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang-ext", add_help=False)
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    if "--config" in argv:
        merger = pkgutil.resolve_name(lines.current().config_merger)
        argv = merger(parser).merge_config_with_args(list(argv))
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(
            f"{' '.join(unknown)}: not a flag of this command nor of SGLang"
            " (python -m sglang.launch_server --help lists those; MODEL comes first)"
        )
    return vars(found)


def as_flags(arguments: Options) -> list[str]:
    """SGLang arguments as a command line."""
    line: list[str] = []
    for name, value in arguments.items():
        line.append("--" + name.replace("_", "-"))
        if value is not True:
            line.append(str(value))
    return line


def server_argv(rest: Sequence[str]) -> list[str]:
    """The command line for SGLang's server: the user's, and our defaults for what it leaves open.

    Raises:
        ValueError: an unknown flag, or two models.
    """
    from sglang_ext.serving.engine import server_defaults

    model, flags = (rest[0], list(rest[1:])) if rest and not rest[0].startswith("-") else (None, list(rest))
    found = given_flags(flags)
    if model is not None and "model_path" in found:
        raise ValueError(f"two models, {model} and --model-path {found['model_path']}: give one")
    defaults = {name: value for name, value in server_defaults().items() if name not in found}
    if "model_path" not in found:
        defaults = {"model_path": model or str(REFERENCE_MODEL), **defaults}
    return [*as_flags(defaults), *flags]


def environment(args: argparse.Namespace) -> dict[str, str]:
    """The environment variables that carry our flags to the server's processes; nothing heavy is imported for it.

    Raises:
        ValueError: a flag, or what the environment holds already, is wrong.
    """
    early.check_policy_flag(args.policy or os.environ.get(POLICY_ENV) or None, args.rest)
    settings = settings_with(given(args, ServerSettings))
    early.check_tenants(json.loads(settings).get("tenants"), args.rest)
    found = {SETTINGS_ENV: settings}
    if args.policy is not None:
        found[POLICY_ENV] = args.policy
    if args.pool_dir is not None:
        found[POOL_DIR_ENV] = early.folder(args.pool_dir)
    early.check_typing_errors(args.rest, own_flags())
    return found


def own_flags() -> list[str]:
    """The flags of `sglang-ext serve` that SGLang does not see."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return [name for name in parser._option_string_actions if name.startswith("--")]


def main(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    os.environ.update(environment(args))
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugin()
    server_args = prepare_server_args(server_argv(args.rest))
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0
