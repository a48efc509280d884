"""The command line that `sglang-ext serve` hands to SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.launch import serve
from sglang_ext.serving.engine import server_defaults


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
    import argparse

    import sglang.launch_server
    import sglang.srt.server_args
    import sglang.srt.utils

    from sglang_ext.attention.policy import policies
    from sglang_ext.config import POLICY_ENV

    monkeypatch.setenv(POLICY_ENV, "{}")
    seen: list[float] = []
    monkeypatch.setattr(serve, "load_plugin", lambda: None)
    monkeypatch.setattr(sglang.srt.server_args, "prepare_server_args", lambda argv: argv)
    monkeypatch.setattr(sglang.srt.utils, "kill_process_tree", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        sglang.launch_server, "run_server", lambda args: seen.append(policies()["double_p"]().config.p2)
    )
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    for flags, p2 in (([], 0.7), (["--policy", '{"p2": 0.5}'], 0.5)):
        args = parser.parse_args(flags)
        args.rest = ["M"]
        assert serve.main(args) == 0 and seen[-1] == p2
