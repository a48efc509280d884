"""The command line that `sglang-ext serve` hands to SGLang, and what it refuses before that."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ext.config import POLICY_ENV
from sglang_ext.launch import early, serve
from sglang_ext.serving.engine import Engine, SglangEngine, _in_environment, server_defaults
from sglang_ext.settings import POOL_DIR_ENV, SETTINGS_ENV, ServerSettings, server_settings
from sglang_ext.systems.registry import ours, systems


def value(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1, (flag, argv)
    return argv[argv.index(flag) + 1]


def test_defaults_are_added_and_the_rest_is_unchanged() -> None:
    theirs = ["--port", "31000", "--tp-size=2", "--dtype", "float32", "--served-model-name", "M"]
    argv = serve.server_argv(["M", *theirs])
    assert argv[-len(theirs) :] == theirs
    assert value(argv, "--model-path") == "M"
    assert value(argv, "--attention-backend") == "dbsa"
    assert value(argv, "--radix-cache-backend") == "sglang_ext"
    for name, setting in server_defaults().items():
        flag = "--" + name.replace("_", "-")
        assert flag in argv if setting is True else value(argv, flag) == str(setting)


def test_what_the_user_sets_stays() -> None:
    argv = serve.server_argv(["M", "--attention-backend", "triton", "--page-size=16"])
    assert value(argv, "--attention-backend") == "triton"
    assert "--page-size" not in argv and "--page-size=16" in argv
    assert value(argv, "--radix-cache-backend") == "sglang_ext"


def test_the_embedded_model_and_model_path() -> None:
    embedded = value(serve.server_argv([]), "--model-path")
    assert Path(embedded) == serve.REFERENCE_MODEL and (Path(embedded) / "config.json").is_file()
    assert value(serve.server_argv(["--model-path", "M"]), "--model-path") == "M"
    assert value(serve.server_argv(["--port", "1"]), "--model-path") == embedded
    with pytest.raises(ValueError, match="two models"):
        serve.server_argv(["M", "--model-path", "N"])


def test_a_configuration_file_counts_as_set(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("attention-backend: triton\nmodel-path: M\n")
    argv = serve.server_argv(["--config", str(file)])
    assert "--attention-backend" not in argv and "--model-path" not in argv
    assert argv[-2:] == ["--config", str(file)]


def test_unknown_flags_are_named() -> None:
    with pytest.raises(ValueError, match="--polo 3: not a flag"):
        serve.server_argv(["M", "--polo", "3"])
    with pytest.raises(ValueError, match="MODEL comes first"):
        serve.server_argv(["--port", "1", "M"])


def test_a_server_without_the_plugin_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import plugins
    from sglang.srt.layers.attention import attention_registry

    monkeypatch.setattr(plugins, "load_plugins", lambda: None)
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", {})
    with pytest.raises(ValueError, match="sglang-ext doctor"):
        serve.load_plugin()


def test_options_of_the_policy_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.launch_server
    import sglang.srt.server_args
    import sglang.srt.utils

    monkeypatch.setenv(POLICY_ENV, "{}")
    seen: list[float] = []
    monkeypatch.setattr(serve, "load_plugin", lambda: None)
    monkeypatch.setattr(serve, "given_flags", lambda argv: {})  # without the plugin SGLang knows no double_p
    monkeypatch.setattr(sglang.srt.server_args, "prepare_server_args", lambda argv: argv)
    monkeypatch.setattr(sglang.srt.utils, "kill_process_tree", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        sglang.launch_server, "run_server", lambda args: seen.append(systems()["double_p"].make_policy().config.p2)
    )
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    for flags, p2 in (([], 0.7), (["--policy", '{"p2": 0.5}'], 0.5)):
        args = parser.parse_args(flags)
        args.rest = ["M", "--attention-backend", "double_p"]
        assert serve.main(args) == 0 and seen[-1] == p2


# ---- refused before torch and SGLang are imported ----

WITHOUT_TORCH = """
import sys, time
begin = time.process_time()  # of this process alone: the machine may be crowded
from sglang_ext.launch import cli
try:
    status = cli.main(sys.argv[1:])
except SystemExit as end:
    status = end.code
heavy = sorted({"torch", "sglang", "transformers"} & set(sys.modules))
print(status, heavy, time.process_time() - begin)
"""


def early_end(*line: str, **variables: str) -> str:
    """What a command says that is to end with status 2 in less than three seconds, with nothing heavy imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *line], capture_output=True, text=True, env={**os.environ, **variables}
    )
    status, heavy, seconds = done.stdout.rsplit("\n", 2)[-2].split(maxsplit=2)
    assert (status, heavy) == ("2", "[]"), done.stdout + done.stderr
    assert float(seconds) < 3, f"{seconds} s"
    return done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--policy", "{"], "--policy={: expected a JSON object"),
        (["--policy", "[1]", "--attention-backend", "quest"], "got a list"),
        (["--policy", '{"p1": 0.9}'], "--policy with --attention-backend dbsa: unknown option p1; known are host_gb"),
        (["--policy", '{"host_gb": 0}'], "host_gb=0: expected more than 0 GiB"),
        (["--policy", '{"host_gb": 1}', "--attention-backend", "double_p"], "unknown option host_gb; known are"),
        (["--policy", '{"p3": 1}', "--attention-backend", "double_p"], "unknown option p3; known are"),
        (["--policy", '{"p1": 2}', "--attention-backend=double_p"], "p1=2, p2=0.7: expected 0 < p1 <= 1"),
        (["--policy", '{"p1": "x"}', "--attention-backend", "dbsa+double_p"], "p1='x' is a str"),
        (["--policy", '{"cascades": 99, "window": 990}', "--attention-backend", "cascade"], "at most 13"),
        (["--policy", '{"cascades": 3}', "--attention-backend", "cascade"], "expected a multiple"),
        (["--max-pools", "0"], "max_pools=0: expected a whole number of at least 1"),
        (["--max-pools", "many"], "invalid int value: 'many'"),
        (["--max-pool", "3"], "--max-pool: not a flag of this command nor of SGLang; did you mean --max-pools?"),
        (["--polcy={}"], "did you mean --policy?"),
        (["--open-conversation"], "did you mean --open-conversations?"),
        (["--pool-dir", __file__], "is a file; expected a folder"),
        (["--pool-dir", __file__ + "/below"], "is a file; expected a folder"),
        (["--tenants", __file__, "--api-key", "k"], "it is not JSON (Extra data"),
        (["--tenants", "/nowhere/file.json"], "--tenants /nowhere/file.json: it cannot be read"),
    ],
)
def test_our_own_wrong_flags_are_refused_at_once(line: list[str], words: str) -> None:
    assert words in early_end("serve", "M", "--port", "31000", *line)


def test_a_wrong_environment_is_refused_at_once() -> None:
    assert "unknown option max_pool" in early_end("serve", SGLANG_EXT_SETTINGS='{"max_pool": 3}')
    assert "SGLANG_EXT_SETTINGS=3: expected a JSON object" in early_end("serve", SGLANG_EXT_SETTINGS="3")
    words = early_end("serve", "--attention-backend", "quest", SGLANG_EXT_POLICY='{"pages": 3}')
    assert "unknown option pages" in words


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "dbsa"),
        (["--attention-backend", "quest"], "quest"),
        (["--attention-backend=quest", "--attention-backend=cascade"], "cascade"),
        (["--config", "a.yaml"], None),
        (["--attention-b", "quest"], None),
        (["--port", "1", "--attention-backend"], ""),
    ],
)
def test_the_backend_is_known_early(argv: list[str], name: str | None) -> None:
    assert early.attention_backend(argv) == name


def test_backends_say_what_their_policies_take() -> None:
    """`--policy` is checked against a table that imports no torch; it must be what the policies read."""
    assert set(ours()) == set(systems())
    for name, system in systems().items():
        assert getattr(type(system.make_policy()), "options", None) is system.options, name


def test_no_flag_of_sglangs_is_taken_for_a_typing_error() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    early.check_typing_errors([name for name in parser._option_string_actions], serve.own_flags())
    with pytest.raises(ValueError, match="did you mean --max-prompts"):
        early.check_typing_errors(["--max-prompt", "3"], serve.own_flags())


def test_settings_go_before_those_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SETTINGS_ENV, '{"max_pools": 5, "max_prompts": 6}')
    monkeypatch.delenv(POLICY_ENV, raising=False)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["--max-pools", "7", "--open-conversations", "--pool-dir", str(tmp_path / "new")])
    args.rest = []
    found = serve.environment(args)
    assert json.loads(found.pop(SETTINGS_ENV)) == {"max_pools": 7, "max_prompts": 6, "open_conversations": True}
    assert found == {POOL_DIR_ENV: str(tmp_path / "new")}


def test_an_engine_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_ENV, '{"max_pools": 5}')
    monkeypatch.delenv(POLICY_ENV, raising=False)
    monkeypatch.setenv(POOL_DIR_ENV, "operator")
    with _in_environment("pools", {"p1": 0.9}, {"max_prompts": 2}):
        assert os.environ[POOL_DIR_ENV] == "pools"
        assert server_settings() == ServerSettings(max_pools=5, max_prompts=2)
        assert os.environ[POLICY_ENV] == '{"p1": 0.9}'
    assert os.environ[SETTINGS_ENV] == '{"max_pools": 5}' and POLICY_ENV not in os.environ
    assert os.environ[POOL_DIR_ENV] == "operator"
    with pytest.raises(ValueError, match="unknown option max_pool;"), _in_environment(None, None, {"max_pool": 1}):
        pass


@pytest.mark.parametrize("before", [None, "operator"])
def test_an_engine_that_fails_leaves_its_pool_dir_to_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None
) -> None:
    """An engine without one keeps no pools, whatever the environment says."""
    if before is None:
        monkeypatch.delenv(POOL_DIR_ENV, raising=False)
    else:
        monkeypatch.setenv(POOL_DIR_ENV, before)
    seen: list[str] = []

    def fails(engine: Engine, **arguments: object) -> None:
        seen.append(os.environ[POOL_DIR_ENV])
        raise RuntimeError("no model")

    monkeypatch.setattr(SglangEngine, "__init__", fails)
    for given in (tmp_path, None):
        with pytest.raises(RuntimeError, match="no model"):
            Engine(pool_dir=given, model_path="none")
        assert os.environ.get(POOL_DIR_ENV) == before
    assert seen == [str(tmp_path), ""]
