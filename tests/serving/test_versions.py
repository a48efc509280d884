"""A folder of versions: a number is claimed once, whoever tries at once, and nothing else is ever read as a version."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.config import PoolOptions, split_name
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.layout import parse_demonstrations
from sglang_ext.serving.pool import Definition
from sglang_ext.serving.store import PoolStore
from sglang_ext.serving.versions import Damaged, Replaced, VersionStore

NUMBERS = 600
CLAIMANTS = 4


def definition(text: str = "x") -> dict[str, Any]:
    items = parse_demonstrations([{"id": "d", "input": text, "output": "y"}])
    return Definition(PoolOptions(), {item.id: item for item in items}, (("d",),)).dump()


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path)


def won(folder: Path, claimant: int) -> list[int]:
    """The numbers that one claimant gets, which tries all of them, in order, as fast as it can."""
    store, found = VersionStore(folder), []
    for number in range(1, NUMBERS + 1):
        try:
            store.claim("p", number, definition(f"{claimant} {number}"))
        except PoolError as error:
            assert error.status_code == 409 and f"version {number}" in str(error)
        else:
            found.append(number)
    return found


def check_race(folder: Path, winners: list[list[int]]) -> None:
    assert sorted(number for each in winners for number in each) == list(range(1, NUMBERS + 1)), "one winner each"
    assert sum(map(bool, winners)) > 1, "one claimant won all: nobody raced"
    store = VersionStore(folder)
    assert store.newest() == {"p": NUMBERS}
    (last,) = [claimant for claimant, numbers in enumerate(winners) if NUMBERS in numbers]
    kept = store.read("p", NUMBERS)
    assert kept is not None and kept["demonstrations"][0]["input"] == f"{last} {NUMBERS}"
    for number in range(1, NUMBERS):
        with pytest.raises(Replaced):
            store.read("p", number)
    assert not list(folder.glob(".*")), "temporary files are left"


def test_threads_claim_each_number_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(CLAIMANTS) as threads:
        winners = list(threads.map(lambda claimant: won(tmp_path, claimant), range(CLAIMANTS)))
    check_race(tmp_path, winners)


CLAIM = """
import json, sys
from pathlib import Path
from tests.serving.test_versions import won
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(won(Path(sys.argv[1]), int(sys.argv[2]))))
"""


def test_processes_claim_each_number_once(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]

    def start(claimant: int) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", CLAIM, str(tmp_path), str(claimant)]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)

    processes = [start(claimant) for claimant in range(CLAIMANTS)]
    for each in processes:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    check_race(tmp_path, [json.loads(each.communicate(timeout=60)[0]) for each in processes])


def test_numbers_go_on_after_a_deletion(store: VersionStore) -> None:
    store.claim("p", 1, definition())
    store.claim("p", 2, None)
    assert store.newest() == {"p": 2} and store.read("p", 2) is None
    with pytest.raises(PoolError, match="version 2"):
        store.claim("p", 2, definition())
    store.claim("p", 3, definition("new"))
    assert store.read("p", 3) == definition("new")


def test_a_link_whose_answer_nfs_lost_is_ours(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends the request again, and is told that the file is there."""
    link = os.link

    def twice(source: Any, target: Any) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    store.claim("p", 1, definition())
    assert store.read("p", 1) == definition()
    with pytest.raises(PoolError, match="on another server at the same time"):
        store.claim("p", 1, definition("other"))
    assert store.read("p", 1) == definition()


FAULTS = {
    "a full disk": ("fsync", errno.ENOSPC, "No space left"),
    "a read-only folder": ("link", errno.EROFS, "Read-only"),
    "no hard links": ("link", errno.EPERM, "must have hard links"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_claims_nothing(store: VersionStore, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    call, number, words = FAULTS[fault]

    def fail(*_args: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match=words):
            store.claim("p", 1, definition())
    assert os.listdir(store.directory) == []
    store.claim("p", 1, definition())


def test_a_version_that_cannot_be_emptied_was_claimed(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.claim("p", 1, definition())

    def fail(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        store.claim("p", 2, definition("second"))
    assert store.read("p", 2) == definition("second") and not list(store.directory.glob(".*"))


def test_what_was_replaced_leaves_the_disk_at_a_start(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server that replaced it was killed before it could empty the file."""
    store.claim("p", 1, definition("secret"))
    monkeypatch.setattr(VersionStore, "_empty", lambda *_args: None)
    store.claim("p", 2, definition("second"))
    monkeypatch.undo()
    path = store.directory / "p@1.json"
    assert "secret" in path.read_text(encoding="utf-8")
    store.tidy()
    assert "secret" not in path.read_text(encoding="utf-8") and store.read("p", 2) == definition("second")
    with pytest.raises(Replaced):
        store.read("p", 1)
    before = path.stat().st_ino
    store.tidy()
    assert path.stat().st_ino == before, "it is not written again at each start"


def test_the_longest_name_fits(store: VersionStore) -> None:
    name = "n" * 128
    for number in (1, 10**17, 10**17 + 1):
        store.claim(name, number, definition())
    assert store.newest() == {name: 10**17 + 1}
    store.claim(name, 10**17 + 2, None)
    store.tidy()
    with pytest.raises(Replaced):
        store.read(name, 10**17 + 1)


DAMAGED = {
    "half of it": lambda text: text[: len(text) // 2],
    "nothing": lambda _text: "",
    "a later format": lambda text: text.replace('"format": 1', '"format": 2'),
    "another pool": lambda text: text.replace('"name": "p"', '"name": "q"'),
    "no demonstrations": lambda text: text.replace('"demonstrations"', '"others"'),
    "an unknown end": lambda text: text.replace('"options"', '"gone": "moved", "options"'),
    "a list": lambda _text: "[]",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_no_version_is_damaged(store: VersionStore, damage: str) -> None:
    store.claim("p", 1, definition())
    path = store.directory / "p@1.json"
    path.write_text(DAMAGED[damage](path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(Damaged, match=r"p@1\.json is not a pool definition"):
        store.read("p", 1)
    store.claim("p", 2, definition("new"))
    assert store.read("p", 2) == definition("new")


def test_a_folder_of_one_server_is_adopted(tmp_path: Path) -> None:
    PoolStore(tmp_path).save("p", 4, definition())
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    before = (tmp_path / "p.json").read_bytes()
    store = VersionStore(tmp_path)
    for _ in range(2):  # at every start, of every server
        (problem,) = store.adopt()
        assert "bad.json is not a pool definition" in problem and "stays where it is" in problem
    assert store.newest() == {"p": 4} and store.read("p", 4) == definition()
    store.claim("p", 5, None)
    store.adopt()
    assert store.newest() == {"p": 5}, "what was deleted stays deleted"
    assert (tmp_path / "p.json").read_bytes() == before and (tmp_path / "bad.json").exists()


def test_a_server_of_its_own_refuses_a_shared_folder(store: VersionStore) -> None:
    store.claim("p", 1, definition())
    with pytest.raises(ValueError, match=r"p@1\.json is in it\): start with --pool-scan-seconds"):
        PoolStore(store.directory).load(strict=False)
    assert store.read("p", 1) == definition()


def test_temporary_files_of_others_stay(store: VersionStore) -> None:
    other = store.directory / ".p.x.tmp"
    other.write_text("half", encoding="utf-8")
    store.adopt()
    store.claim("p", 1, definition())
    assert other.exists() and store.newest() == {"p": 1}


def test_names_with_versions() -> None:
    assert split_name("tickets") == ("tickets", None)
    assert split_name("tickets@7") == ("tickets", 7)
    assert split_name("a.json@10") == ("a.json", 10)
    for wrong in (
        "tickets@",
        "tickets@0",
        "tickets@07",
        "tickets@x",
        "tickets@1@2",
        "@",
        "tickets@-1",
        "tickets@\u0661",
    ):
        with pytest.raises(ValueError, match="names have no '@'"):
            split_name(wrong)
