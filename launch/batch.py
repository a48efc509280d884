"""Answer a file of questions offline, through SGLang's engine in this process; resumes where it stopped.

sglang-ext batch IN.jsonl OUT.jsonl [--model M] [--pool NAME=FILE.jsonl] [options] [any flag of sglang.launch_server]

A line of IN is {"input": TEXT} (or "text", or "input_ids": [...]), with, if you like, "id" (else it is the line's
number), "sampling_params" and "custom_params", which go before the options given here; "output" and "label" are left
alone. Answers are appended to OUT as they come, in any order: {"id", "text", "meta_info"}, or {"id", "error"}.
Questions whose id is in OUT already are not asked again. Exit status 1: some line of OUT is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sglang_ext.config import PoolOptions, RequestOptions, check_name
from sglang_ext.launch import early
from sglang_ext.launch.answers import counted, failure
from sglang_ext.launch.options import add_flags, given
from sglang_ext.launch.pool import read_demonstrations
from sglang_ext.launch.serve import REFERENCE_MODEL, add_pool_dir, given_flags, load_plugin
from sglang_ext.retrievers import registry
from sglang_ext.settings import ServerSettings, settings_with
from sglang_ext.types import JsonObject, Options

if TYPE_CHECKING:
    from sglang_ext.names import Engine


PASSES_ON = True

_TEXTS = ("input", "text", "input_ids")
_KNOWN = {"id", *_TEXTS, "sampling_params", "custom_params", "output", "label"}
OVER_HTTP = ("open_conversations", "pool_metrics", "max_pool_mb", "max_request_mb", "max_responses")
"""Settings of a server that an engine in this process has no use for."""

_CHOICES = ("ratio", "blocks", "block_ids")  # of which a request has one


@dataclass(frozen=True)
class Question:
    """One line of IN: what to ask the engine, or what is wrong with the line."""

    id: str | int
    request: JsonObject | None = None
    error: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sglang-ext batch`."""
    parser.usage = "sglang-ext batch IN.jsonl OUT.jsonl [options] [SGLang's flags]"
    parser.add_argument("input", metavar="IN.jsonl")
    parser.add_argument("output", metavar="OUT.jsonl")
    parser.add_argument("--model", help="a folder or a name (default: the small model that comes with this package)")
    parser.add_argument(
        "--pool",
        action="append",
        default=[],
        metavar="NAME[=FILE.jsonl]",
        help="make this pool first, or use one of --pool-dir; with several, each line names its own in custom_params",
    )
    add_pool_dir(parser)
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="requests at a time (default: 32)")
    parser.add_argument("--retry-failed", action="store_true", help="ask again what is an error in OUT")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="length of an answer (default: SGLang's, 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of sampling (default: 0)")
    add_flags(parser, RequestOptions, "options of every request with a pool", skip=("pool",))
    add_flags(parser, PoolOptions, "options of the pools made here")
    add_flags(parser, ServerSettings, "limits of the engine", skip=OVER_HTTP)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_questions(text: str, sampling: Options, custom: Options, needs_pool: bool = False) -> list[Question]:
    """The questions of IN; a line that cannot be asked becomes a question with an error.

    Args:
        sampling: sampling_params that a line's own go before.
        custom: custom_params that a line's own go before.
        needs_pool: a question without a pool is an error (else it is a plain request).

    Raises:
        ValueError: two lines have one id, so that answers could not be told apart.
    """
    questions: list[Question] = []
    places: dict[str | int, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        question = _question(line, number, sampling, custom, needs_pool)
        if question.id in places:
            raise ValueError(f"lines {places[question.id]} and {number} both have the id {question.id!r}")
        places[question.id] = number
        questions.append(question)
    return questions


def _question(line: str, number: int, sampling: Options, custom: Options, needs_pool: bool) -> Question:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        return Question(number, error=f"line {number} is not JSON ({error.msg})")
    if not isinstance(item, dict):
        return Question(number, error=f"line {number} is a {type(item).__name__}: expected an object")
    id = item.get("id", number)
    if not isinstance(id, (str, int)) or isinstance(id, bool):
        return Question(number, error=f"line {number}: id {id!r}: expected a string or a whole number")
    try:
        request = _request(item, sampling, custom)
        if needs_pool and "pool" not in request["sampling_params"].get("custom_params", {}):
            raise ValueError('which pool? name it in the line: "custom_params": {"pool": NAME}')
    except ValueError as error:
        return Question(id, error=f"line {number}: {error}")
    return Question(id, request)


def _request(item: JsonObject, sampling: Options, custom: Options) -> JsonObject:
    """Arguments of `Engine.async_generate`."""
    unknown = sorted(set(item) - _KNOWN)
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(sorted(_KNOWN))}")
    texts = [name for name in _TEXTS if name in item]
    if len(texts) != 1:
        raise ValueError(f"got {' and '.join(texts) or 'no question'}: expected one of {', '.join(_TEXTS)}")
    value = item[texts[0]]
    if texts[0] == "input_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise ValueError("input_ids: expected a list of whole numbers")
    elif not isinstance(value, str):
        raise ValueError(f"{texts[0]} is a {type(value).__name__}: expected a string")
    own = {name: item.get(name) or {} for name in ("sampling_params", "custom_params")}
    for name, params in own.items():
        if not isinstance(params, dict):
            raise ValueError(f"{name} is a {type(params).__name__}: expected an object")
    params = {**sampling, **own["sampling_params"]}
    asked = {**(params.pop("custom_params", None) or {}), **own["custom_params"]}
    if any(name in asked for name in _CHOICES):
        custom = {name: option for name, option in custom.items() if name not in _CHOICES}
    if custom or asked:
        params["custom_params"] = {**custom, **asked}
    return {"input_ids" if texts[0] == "input_ids" else "prompt": value, "sampling_params": params}


# ---- OUT ------------------------------------------------------------------------------------------------------------


def open_output(path: Path, retry_failed: bool) -> tuple[IO[bytes], dict[str | int, bool]]:
    """OUT, to append to, held against other runs; and what is in it: id -> whether it is an answer (not an error).

    A last line without its end, which a run that was killed leaves behind, is cut off; this is said on stderr.

    Args:
        retry_failed: take the errors out of the file.

    Raises:
        ValueError: another run has the file, or a line is not one of ours.
    """
    file: IO[bytes] = path.open("ab+")
    try:
        _lock(file, path)
        file.seek(0)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            file.truncate(len(whole))
            print(f"{path}: its last line is half written; cut off, to be asked again", file=sys.stderr)
        done = _records(whole, path)
        if retry_failed and not all(done.values()):
            kept = [line for line in whole.splitlines(keepends=True) if "error" not in json.loads(line)]
            with file:
                file = _replaced(path, b"".join(kept))
            done = {id: True for id, answered in done.items() if answered}
        return file, done
    except BaseException:
        file.close()
        raise


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{path}: another run is writing it") from error


def _records(data: bytes, path: Path) -> dict[str | int, bool]:
    done = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            record = json.loads(line)
            done[record["id"]] = "error" not in record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: line {number} was not written by sglang-ext batch: name another file") from error
    return done


def _replaced(path: Path, data: bytes) -> IO[bytes]:
    """`path` with other content, in one step, locked and opened to append to."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    file = temporary.open("ab")
    _lock(file, path)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    os.replace(temporary, path)
    return file


# ---- asking ---------------------------------------------------------------------------------------------------------


async def answer_all(
    engine: Engine, questions: Sequence[Question], file: IO[bytes], concurrency: int, answered: Callable[[], None]
) -> list[str]:
    """Ask every question, at most `concurrency` at a time, and append each answer as it comes.

    Args:
        engine: has `async_generate` of `sglang.Engine`.
        answered: called after each.

    Returns:
        Why some failed: a reason for each of them.
    """
    waiting = iter(questions)
    reasons: list[str] = []

    async def work() -> None:
        for question in waiting:  # shared: each worker takes the next one
            record = await _record(engine, question)
            file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            file.flush()
            if "error" in record:
                reasons.append(record["error"])
            answered()

    workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, len(questions)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return reasons


async def _record(engine: Engine, question: Question) -> JsonObject:
    """The line of OUT that answers one question. What is wrong with the question itself is its answer; all else ends
    the run."""
    from fastapi import HTTPException

    if question.request is None:
        return {"id": question.id, "error": question.error}
    try:
        answer = await engine.async_generate(**question.request)
    except HTTPException as error:  # PoolError among them; SGLang says so of what its scheduler refuses
        return {"id": question.id, "error": str(error.detail)}
    except ValueError as error:
        return {"id": question.id, "error": str(error)}
    except (KeyError, TypeError, AttributeError) as error:
        # SGLang's own way of saying that it cannot read a parameter: a bare name, or the types it tripped over.
        what = f"{type(error).__name__}: {error}"
        return {"id": question.id, "error": f"SGLang cannot read sampling_params or custom_params ({what})"}
    reason = failure(answer)
    if reason is not None:
        return {"id": question.id, "error": reason}
    return {"id": question.id, "text": answer["text"], "meta_info": answer["meta_info"]}


# ---- the command ----------------------------------------------------------------------------------------------------


def pool_files(given_pools: Sequence[str], pool_dir: str | None) -> dict[str, str | None]:
    """Name -> file (None: it is in --pool-dir already) of every --pool.

    Raises:
        ValueError: a name twice, an impossible name, or no file and no --pool-dir.
    """
    pools: dict[str, str | None] = {}
    for each in given_pools:
        name, equals, file = each.partition("=")
        check_name(name)
        if name in pools:
            raise ValueError(f"--pool {name} is given twice")
        if not equals and pool_dir is None:
            raise ValueError(f"--pool {each}: expected NAME=FILE.jsonl, or --pool-dir with a pool of that name")
        pools[name] = file if equals else None
    return pools


def _check(args: argparse.Namespace, pools: Mapping[str, str | None]) -> JsonObject:
    """custom_params of every request; ValueError for options that contradict each other."""
    custom = given(args, RequestOptions, skip=("pool",))
    if args.concurrency < 1:
        raise ValueError(f"--concurrency {args.concurrency}: expected at least 1")
    if custom and not pools and args.pool_dir is None:
        raise ValueError(f"{', '.join(custom)}: options of requests with a pool; give --pool NAME=FILE.jsonl")
    if "retriever" in custom:
        registry.get(custom["retriever"])
    if args.pool_dir is not None:
        early.folder(args.pool_dir)
    settings_with(given(args, ServerSettings))
    if not any(pools.values()) and given(args, PoolOptions):
        raise ValueError(f"{', '.join(given(args, PoolOptions))}: options of a pool made here; give its file")
    if len(pools) == 1:
        custom["pool"] = next(iter(pools))
    RequestOptions.parse({"pool": "any", **custom})
    return custom


def main(args: argparse.Namespace) -> int:
    """Answer what is not answered yet; 0, or 1 when an answer is an error."""
    pools = pool_files(args.pool, args.pool_dir)
    custom = _check(args, pools)
    demonstrations = {name: read_demonstrations(file) for name, file in pools.items() if file is not None}
    sampling: JsonObject = {"temperature": args.temperature}
    if args.max_new_tokens is not None:
        sampling["max_new_tokens"] = args.max_new_tokens
    questions = read_questions(
        Path(args.input).read_bytes().decode("utf-8-sig"), sampling, custom, bool(pools or custom)
    )

    arguments = _engine_arguments(args)
    path = Path(args.output)
    file, done = open_output(path, args.retry_failed)
    with file:
        foreign = set(done) - {question.id for question in questions}
        if foreign:
            raise ValueError(
                f"{path} holds {len(foreign)} ids that {args.input} lacks, {sorted(foreign, key=str)[0]!r} among them:"
                " it belongs to another file; name a new one"
            )
        left = [question for question in questions if question.id not in done]
        if done:
            print(f"{path}: {len(done)} of {len(questions)} are there already", file=sys.stderr)
        before = sum(not answered for answered in done.values())
        reasons = _run(args, arguments, left, demonstrations, file, len(questions)) if left else []
    failed = before + len(reasons)
    why = f": {counted(reasons)}" if reasons else ""
    print(f"{path}: {len(questions) - failed} answers, {failed} errors{why}", file=sys.stderr)
    return 1 if failed else 0


def _engine_arguments(args: argparse.Namespace) -> JsonObject:
    arguments = given_flags(args.rest) if args.rest else {}
    if args.model is not None and "model_path" in arguments:
        raise ValueError(f"two models, {args.model} and --model-path {arguments['model_path']}: give one")
    arguments.setdefault("model_path", args.model or str(REFERENCE_MODEL))
    return arguments


def _run(
    args: argparse.Namespace,
    arguments: Options,
    left: Sequence[Question],
    demonstrations: Mapping[str, list[JsonObject]],
    file: IO[bytes],
    total: int,
) -> list[str]:
    """Start the engine, make the pools, answer; returns why some failed."""
    from tqdm import tqdm

    load_plugin()
    from sglang_ext import Engine

    begin = time.perf_counter()
    engine = Engine(pool_dir=args.pool_dir, settings=given(args, ServerSettings), **arguments)
    try:
        for name, items in demonstrations.items():
            info = engine.create_pool(name, items, **given(args, PoolOptions))
            print(
                f"pool {name}: {info['demonstrations']} demonstrations in {info['num_blocks']} blocks,"
                f" {info['tokens']} tokens, {info['setup_seconds']:.1f} s",
                file=sys.stderr,
            )
        ready = time.perf_counter()
        with tqdm(total=total, initial=total - len(left), unit=" lines", disable=not sys.stderr.isatty()) as bar:
            reasons: list[str] = engine.loop.run_until_complete(
                answer_all(engine, left, file, args.concurrency, bar.update)
            )
        end = time.perf_counter()
        rate = len(left) / (end - ready)
        print(
            f"{len(left)} lines in {end - ready:.1f} s ({rate:.1f} a second), after {ready - begin:.1f} s to start",
            file=sys.stderr,
        )
        return reasons
    finally:
        engine.shutdown()
