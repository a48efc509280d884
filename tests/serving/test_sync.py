"""Pools from one folder to another: what is copied, what is left, what is refused; and servers that use both."""

from __future__ import annotations

import asyncio
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch import cli
from sglang_ext.serving import versions
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.store import PoolStore
from sglang_ext.serving.sync import Synced, sync
from sglang_ext.serving.tenants import FOLDER
from sglang_ext.serving.versions import Replaced, VersionStore
from tests.oracle import models
from tests.serving.imitated import Service
from tests.serving.test_fleet import BLOCKS, SETTINGS, at, inputs, servers, until
from tests.serving.test_versions import definition

LONG = 60.0


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "from").mkdir()
    return tmp_path / "from", tmp_path / "to"


def claimed(folder: Path, name: str, *texts: str | None) -> VersionStore:
    """A folder with versions 1, 2, ... of a pool; None is a deletion."""
    store = VersionStore(folder)
    for number, text in enumerate(texts, start=1 + store.newest().get(name, 0)):
        store.claim(name, number, None if text is None else definition(text))
    return store


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def outcomes(source: Path, target: Path) -> dict[str, tuple[int, str]]:
    return {each.pool: (each.version, each.outcome) for each in sync(source, target)}


def test_the_newest_version_of_each_pool_is_copied_once(folders: tuple[Path, Path]) -> None:
    source, target = folders
    one = claimed(source, "a", "first", "second")
    claimed(source, "gone", "was", None)
    before = files(source)
    told = list(sync(source, target))
    assert told == [Synced("a", 2, "copied"), Synced("gone", 2, "copied", "a deletion")]
    assert files(source) == before
    two = VersionStore(target)
    assert two.newest() == {"a": 2, "gone": 2}
    assert two.read("a", 2) == one.read("a", 2) == definition("second") and two.read("gone", 2) is None
    copied = files(target)
    assert outcomes(source, target) == {"a": (2, "there"), "gone": (2, "there")}
    assert files(target) == copied, "a second time changes nothing"
    claimed(source, "a", "third")
    assert outcomes(source, target) == {"a": (3, "copied"), "gone": (2, "there")}
    assert two.read("a", 3) == definition("third")
    with pytest.raises(Replaced):
        two.read("a", 2)


def test_what_is_newer_there_stays(folders: tuple[Path, Path]) -> None:
    source, target = folders
    claimed(source, "a", "first")
    claimed(target, "a", "first", "theirs")
    before = files(target)
    assert list(sync(source, target)) == [Synced("a", 1, "newer", "version 2 is there")] and files(target) == before


def test_a_number_that_means_two_things_is_refused(folders: tuple[Path, Path]) -> None:
    source, target = folders
    claimed(source, "a", "ours")
    claimed(source, "b", "fine")
    claimed(target, "a", "theirs")
    before = files(target)
    refused, copied = sync(source, target)
    assert (refused.outcome, copied) == ("refused", Synced("b", 1, "copied"))
    assert "is another one: both folders were changed on their own" in refused.words
    assert {name: text for name, text in files(target).items() if name in before} == before


def test_numbers_between_are_passed_over_and_cannot_be_made(folders: tuple[Path, Path]) -> None:
    source, target = folders
    claimed(source, "a", *(f"text {number}" for number in range(1, 8)))
    claimed(source, "new", "x", "y", "z")
    store = claimed(target, "a", "first", "second")
    assert outcomes(source, target) == {"a": (7, "copied"), "new": (3, "copied")}
    assert sorted(files(target)) == ["a@1.json", "a@2.json", "a@3.json", "a@7.json", "new@1.json", "new@3.json"]
    for name, number in (("a", 3), ("new", 1)):  # what a server would make that has not seen the copies
        with pytest.raises(PoolError, match="at the same time"):
            store.claim(name, number, definition("late"))
    for number in (1, 2, 3):
        with pytest.raises(Replaced):
            store.read("a", number)
        assert store.after("a", number) == (number + 1 if number < 3 else 7)
    assert store.after("a", 7) == 8, "of which nothing was seen yet"


def test_a_sync_that_ended_in_the_middle_is_made_good(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = folders
    claimed(source, "a", *"abcdef")
    store, link = claimed(target, "a", "first"), os.link

    def ends(temporary: Path, path: Path) -> None:
        if path.name == "a@6.json":
            raise OSError("the process was killed")
        link(temporary, path)

    with monkeypatch.context() as patched:
        patched.setattr(versions.os, "link", ends)
        with pytest.raises(OSError, match="was killed"):
            list(sync(source, target))
    assert store.newest() == {"a": 2} and not list(target.glob(".*"))
    assert outcomes(source, target) == {"a": (6, "copied")} and store.read("a", 6) == definition("f")


def test_files_that_cannot_be_read_are_named_and_others_copied(folders: tuple[Path, Path]) -> None:
    source, target = folders
    claimed(source, "a", "fine")
    claimed(source, "same", "fine")
    claimed(target, "same", "fine")
    (source / "bad@3.json").write_text('{"format": 99}')
    (target / "same@1.json").write_text("cut of")
    told = {each.pool: each for each in sync(source, target)}
    assert told["a"].outcome == "copied" and told["bad"].outcome == told["same"].outcome == "refused"
    assert str(source / "bad@3.json") in told["bad"].words and str(target / "same@1.json") in told["same"].words
    assert "bad@3.json" not in files(target) and files(target)["same@1.json"] == b"cut of"


def test_a_folder_of_one_servers_own_is_copied_from_and_not_to(folders: tuple[Path, Path]) -> None:
    source, target = folders
    own = PoolStore(source)
    own.save("a", 4, definition("fourth"))
    (source / "bad.json").write_text("[]")
    told = {each.pool: each for each in sync(source, target)}
    assert told["a"] == Synced("a", 4, "copied") and VersionStore(target).read("a", 4) == definition("fourth")
    assert told["bad"].outcome == "refused" and "holds a list" in told["bad"].words
    assert sorted(files(source)) == ["a.json", "bad.json"], "nothing is set aside"
    with pytest.raises(ValueError, match=r"from is one server's own folder \(a.json is in it\).*--pool-scan-seconds"):
        list(sync(target, source))


def test_pools_of_tenants_are_copied_to_the_same_tenants(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = folders
    claimed(source, "a", "the operator's")
    PoolStore(source / FOLDER / "acme").save("a", 4, definition("acme's own folder"))
    claimed(source / FOLDER / "bolt", "a", "bolt's", "newer")
    (source / FOLDER / "note.txt").write_text("no folder")
    assert list(sync(source, target)) == [
        Synced("a", 1, "copied"),
        Synced("a", 4, "copied", tenant="acme"),
        Synced("a", 2, "copied", tenant="bolt"),
    ]
    for place, number, text in ((".", 1, "the operator's"), ("acme", 4, "acme's own folder"), ("bolt", 2, "newer")):
        folder = target if place == "." else target / FOLDER / place
        assert VersionStore(folder).newest() == {"a": number}
        assert VersionStore(folder).read("a", number) == definition(text)
    assert cli.main(["pool", "sync", str(source), str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["a", "1", "there"], ["acme/a", "4", "there"], ["bolt/a", "2", "there"],
    ]  # fmt: skip


def test_folders_that_are_none(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = folders
    file = tmp_path / "file"
    file.write_text("")
    for wrong, words in (((target, source), "is no folder"), ((source, file), "is a file"), ((source, source), "two")):
        with pytest.raises(ValueError, match=words):
            list(sync(*wrong))
    assert not target.exists()


def test_two_syncs_and_a_server_at_once_claim_each_number_once(folders: tuple[Path, Path]) -> None:
    source, target = folders
    for name in "abcdefgh":
        claimed(source, name, *"xyz")
    store = VersionStore(target)

    def put(name: str) -> bool:
        try:
            store.claim(name, 1, definition("theirs"))
        except PoolError:
            return False
        return True

    with ThreadPoolExecutor(3) as threads:
        syncs = [threads.submit(outcomes, source, target) for _ in range(2)]
        made = list(threads.map(put, "hgfedcba"))
        told = [each.result() for each in syncs]
    for name in "abcdefgh":
        assert sorted(each[name] for each in told) == [(3, "copied"), (3, "there")]
        assert store.read(name, 3) == definition("z")
    assert not list(target.glob(".*")) and len(made) == 8


def test_servers_use_both_folders(manager: Any, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_SETTINGS", json.dumps(SETTINGS))
    source, target = folders

    async def copy() -> dict[str, tuple[int, str]]:
        return await asyncio.to_thread(outcomes, source, target)

    async def work() -> None:
        async with servers(manager, source, count=1) as (one,), servers(manager, target, seed=1, count=1) as (two,):
            one.fails = two.fails = 0.0
            await one.put("a", models.demonstrations(7), BLOCKS)
            assert await copy() == {"a": (1, "copied")}
            assert (await two.needed("a@1")).definition.dump() == one.version("a").definition.dump()
            for number in range(2, 7):
                await one.append("a", [{"id": f"n{number}", "input": f"new {number}", "output": "y"}])
                if number % 2 == 0:
                    assert await copy() == {"a": (number, "copied")}
            await until(lambda: at(two, "a") == 6, LONG)
            assert inputs(two, "a") == inputs(one, "a")
            grown = await two.append("a", [{"id": "theirs", "input": "their own", "output": "y"}])
            assert grown["version"] == 7 and await copy() == {"a": (6, "newer")}
            await one.delete("a")
            assert await copy() == {"a": (7, "refused")}
            await one.put("a", models.demonstrations(3), BLOCKS)
            assert await copy() == {"a": (8, "copied")}
            await until(lambda: at(two, "a") == 8, LONG)
            late = Service(manager, random.Random(3), str(target))
            late.fails = 0.0
            await late.restored()
            assert (await late.needed("a")).number == 8
            late.folder.stop()

    asyncio.run(asyncio.wait_for(work(), LONG))


def test_the_command(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = folders
    assert cli.main(["pool", "sync", str(source), str(target)]) == 0
    assert capsys.readouterr().out == f"{source} has no pools\n"
    claimed(source, "a", "x")
    assert cli.main(["pool", "sync", str(source), str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"pool": "a", "version": 1, "outcome": "copied", "words": "", "tenant": ""}
    claimed(source, "b", "ours")
    claimed(target, "b", "theirs")
    assert cli.main(["pool", "sync", str(source), str(target)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:3] == ["a", "1", "there"] and lines[3].split()[:3] == ["b", "1", "refused"]
    assert cli.main(["pool", "sync", str(source / "none"), str(target)]) == cli.BAD_INPUT
    assert "none is no folder" in capsys.readouterr().err
