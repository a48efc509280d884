"""Flags made from the option dataclasses, and that no two flags of a command are one."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from sglang_ext.config import CHOICES, PoolOptions, RequestOptions
from sglang_ext.launch import batch, serve
from sglang_ext.launch.options import add_flags, described, given
from sglang_ext.retrievers.registry import RETRIEVERS
from sglang_ext.settings import ServerSettings


def parse(cls: type, *line: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser, cls, "options")
    return given(parser.parse_args(line), cls)


def test_nothing_given_is_nothing() -> None:
    assert parse(PoolOptions) == {} and parse(RequestOptions) == {}


@pytest.mark.parametrize("cls", [PoolOptions, RequestOptions])
def test_every_field_has_a_flag_and_words(cls: type) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, cls, "options")
    flags = {action.dest: action for action in parser._actions}
    for field in dataclasses.fields(cls):
        assert flags[field.name].help
    parser.format_help()  # a stray % would raise
    assert set(described(cls)) == {field.name for field in dataclasses.fields(cls)}


def test_types() -> None:
    options = parse(
        PoolOptions, "--block-size", "7", "--no-pinned", "--system", "Be brief.", "--pattern", "self", "--seed", "3"
    )
    assert options == {"block_size": 7, "pinned": False, "system": "Be brief.", "pattern": "self", "seed": 3}
    assert PoolOptions.parse(options).block_size == 7
    asked = parse(RequestOptions, "--pool", "p", "--block-ids", "0,3,5", "--label-probs")
    assert RequestOptions.parse(asked).block_ids == (0, 3, 5)
    assert parse(RequestOptions, "--ratio", "0.5") == {"ratio": 0.5}


def test_new_lines_can_be_typed() -> None:
    options = parse(PoolOptions, "--template", r"{input}\n=> {output}", "--separator", r"\n\t\\n")
    assert options == {"template": "{input}\n=> {output}", "separator": "\n\t\\n"}


@pytest.mark.parametrize("line", [["--block-size", "x"], ["--seed"]])
def test_wrong_values_are_refused(line: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(PoolOptions, *line)


@pytest.mark.parametrize("module", [batch, serve])
def test_no_flag_of_ours_is_one_of_sglangs(module) -> None:
    """Ours are taken out of the command line before SGLang sees it."""
    from sglang.srt.server_args import ServerArgs

    ours, theirs = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    module.add_arguments(ours)
    ServerArgs.add_cli_args(theirs)
    # Both --model mean the model's path.
    assert set(ours._option_string_actions) & set(theirs._option_string_actions) <= {"--model"}


@pytest.mark.parametrize("cls", [PoolOptions, RequestOptions])
def test_choices_are_shown_and_enforced(cls: type, capsys: pytest.CaptureFixture[str]) -> None:
    """The values in a field's metadata are those that the dataclass takes, and no others."""
    parser = argparse.ArgumentParser()
    add_flags(parser, cls, "options")
    shown = " ".join(parser.format_help().split())
    base = {"pool": "p"} if cls is RequestOptions else {}
    found = {field.name: field.metadata[CHOICES] for field in dataclasses.fields(cls) if CHOICES in field.metadata}
    assert set(found) == {PoolOptions: {"grouping", "pattern", "positions"}}.get(
        cls, {"order", "granularity", "block_score", "constrain", "choose"}
    )
    for name, choices in found.items():
        flag = f"--{name.replace('_', '-')}"
        assert f"{flag} {{{','.join(choices)}}}" in shown
        for choice in choices:
            assert getattr(cls.parse({**base, name: choice}), name) == choice  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="expected"):
            cls.parse({**base, name: "absent"})  # type: ignore[attr-defined]
        with pytest.raises(SystemExit):
            parser.parse_args([flag, "absent"])
        assert "invalid choice: 'absent'" in capsys.readouterr().err


def test_retrievers_are_shown() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, RequestOptions, "options")
    shown = " ".join(parser.format_help().split())
    assert f"{', '.join(RETRIEVERS)}: name in the registry" in shown
    assert "bm25:stem" in shown
    assert "dense:MODEL" in shown and parse(RequestOptions, "--retriever", "random:7") == {"retriever": "random:7"}


def test_every_setting_of_a_server_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert set(described(ServerSettings)) == {field.name for field in dataclasses.fields(ServerSettings)}
    for field in dataclasses.fields(ServerSettings):
        assert "--" + field.name.replace("_", "-") in parser._option_string_actions
