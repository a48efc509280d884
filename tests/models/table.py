"""The tables of `docs/models.md`: every architecture in every system."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sglang_ext.systems.registry import ours
from tests.models.architectures import HYBRID, MIXED, REFUSED, SERVED, Architecture
from tests.models.run import Outcome, refused, run
from tests.models.serve import deviation, serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- models:begin: written by `make models-table` -->", "<!-- models:end -->"
STOCK = "torch_native"

Outcomes = Mapping[str, Outcome]
"""By system; and, of SGLang's own backend in plain PyTorch, by `STOCK`."""


def main(chosen: Sequence[str]) -> int:
    """Try all architectures, say what came of each, and write the page unless only some systems were asked for."""
    names = list(chosen or ours())
    with tempfile.TemporaryDirectory() as room:
        folders = {each: each.save(Path(room) / str(i)) for i, each in enumerate((*SERVED, *MIXED, *HYBRID, *REFUSED))}
        with serving(folders[SERVED[0]], "dbsa") as engine:  # what is imported now is there in all that are forked
            deviation(engine, folders[SERVED[0]], "dbsa")
        served, mixed, hybrid, declined = {}, {}, {}, {}
        for each in SERVED:
            served[each] = {name: run(each.needs_gpu, folders[each], name) for name in (STOCK, *names)}
            print(each.name, served[each], flush=True)
        for each in MIXED:
            mixed[each] = {name: _partly(each, folders[each], name, _mixed) for name in (STOCK, *names)}
            print(each.name, mixed[each], flush=True)
        for each in HYBRID:
            hybrid[each] = {name: _partly(each, folders[each], name, _hybrid) for name in (STOCK, *names)}
            print(each.name, hybrid[each], flush=True)
        for each in REFUSED:
            declined[each] = {name: refused(folders[each], name) for name in names}
            print(each.name, declined[each][names[0]], flush=True)
    if not chosen:
        partly = [
            *partly_table("models with windows", mixed, _mixed),
            "",
            *partly_table("hybrid linear models", hybrid, _hybrid),
        ]
        write("\n".join([*served_table(served), "", *partly, "", *refused_table(declined)]))
    return 0


def _mixed(name: str) -> bool:
    return name == STOCK or ours()[name].mixed


def _hybrid(name: str) -> bool:
    return name == STOCK or ours()[name].hybrid


def _partly(each: Architecture, folder: Path, name: str, serves: Callable[[str], bool]) -> Outcome:
    return run(each.needs_gpu, folder, name, each.wider) if serves(name) else refused(folder, name)


def served_table(found: Mapping[Architecture, Outcomes]) -> list[str]:
    """Lines of the table of architectures that views serve."""
    lines = ["| models | architecture | what came of it | largest error |", "| --- | --- | --- | --- |"]
    for each, outcomes in found.items():
        stock, systems = outcomes[STOCK], {name: one for name, one in outcomes.items() if name != STOCK}
        if stock.kind != "works":
            said = f"not run: without a GPU, SGLang itself cannot serve it ({each.needs_gpu or stock.words})"
            lines.append(f"| {each.name} | `{each.class_name}` | {said} | |")
            continue
        other = {name: one for name, one in systems.items() if one.kind != "works"}
        said = f"works with all {len(systems)} systems"
        if other:
            worked = len(systems) - len(other)
            details = "; ".join(f"`{name}`: {one.kind}: {one.words}" for name, one in other.items())
            said = f"works with {worked} of {len(systems)} systems; {details}"
        errors = [float(one.words) for one in systems.values() if one.kind == "works"]
        lines.append(f"| {each.name} | `{each.class_name}` | {said} | {max(errors, default=float('nan')):.0e} |")
    return lines


def partly_table(title: str, found: Mapping[Architecture, Outcomes], serves: Callable[[str], bool]) -> list[str]:
    """Lines of the table of models of which systems that say so read some of the layers.

    Args:
        title: what these models are.
        found: what came of each.
        serves: whether a system says so, by name; SGLang's own backend does.

    Raises:
        ValueError: SGLang's own backend does not serve a model, or another system did not refuse it.
    """
    lines = [f"| {title} | architecture | with `double_p` | largest error |", "| --- | --- | --- | --- |"]
    for each, outcomes in found.items():
        serving = {name: one for name, one in outcomes.items() if serves(name)}
        others = {name: one for name, one in outcomes.items() if name not in serving}
        if serving[STOCK].kind != "works" or any(one.kind != "refused" for one in others.values()):
            raise ValueError(f"{each.name}: {outcomes}: expected SGLang's own to work, and a refusal by {list(others)}")
        (one,) = (one for name, one in serving.items() if name != STOCK)
        said, error = ("works", f"{float(one.words):.0e}") if one.kind == "works" else (f"{one.kind}: {one.words}", "")
        lines.append(f"| {each.name} | `{each.class_name}` | {said} | {error} |")
    return lines


def refused_table(found: Mapping[Architecture, Outcomes]) -> list[str]:
    """Lines of the table of architectures that are refused: the exact words, up to what is alike for all.

    Raises:
        ValueError: an architecture was not refused by all systems in these words.
    """
    lines = ["| models | refused with all systems, in these words |", "| --- | --- |"]
    for each, outcomes in found.items():
        words = set()
        for name, one in outcomes.items():
            head, middle, _ = one.words.partition(f": --attention-backend {name} does not serve such models.")
            if one.kind != "refused" or not middle:
                raise ValueError(f"{each.name} with {name}: {one}: expected a refusal by its configuration")
            words.add(head)
        (said,) = words
        lines.append(f"| {each.name} | {said} |")
    return lines


def write(tables: str) -> None:
    """Put the tables between the marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")
