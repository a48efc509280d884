"""Train the reference model: one script, seeded, resumable, any GPU (or, for tiny shapes, the CPU).

    python -m sglang_ext.launch.reference.train --data DIR --out DIR --phases 1024x128x800,4096x32x2000

A phase is ``TOKENSxROWSxSTEPS``. The output directory holds the exported model (bfloat16), what is needed to go on
from it (``--resume DIR``: the weights' low bits, the optimizers' states) and ``curve.jsonl``: the loss, and the
accuracy on held-out classes by the number of earlier demonstrations of the class, every ``--every`` steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import sglang_ext
from sglang_ext.launch.reference.corpus import split_rows
from sglang_ext.launch.reference.episodes import MIX, EpisodeRow, EpisodeSampler, batch
from sglang_ext.launch.reference.model import ReferenceLlama, export
from sglang_ext.launch.reference.tokens import Corpus
from sglang_ext.types import JsonObject

ASSETS = Path(sglang_ext.__file__).resolve().parent / "assets" / "reference"
SHOTS = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 31))  # bins of the validation curve
Phase = tuple[int, int, int]  # tokens a row, rows a step, steps


def parse_phases(text: str) -> list[Phase]:
    """``"1024x64x500,4096x16x500"`` to [(1024, 64, 500), (4096, 16, 500)]."""
    try:
        phases = [
            (int(tokens), int(rows), int(steps)) for tokens, rows, steps in (p.split("x") for p in text.split(","))
        ]
        if any(min(phase) < 1 for phase in phases):
            raise ValueError
    except ValueError:
        raise ValueError(f"phases {text!r}; expected TOKENSxROWSxSTEPS[,...] of positive integers") from None
    return phases


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Batch i of the run follows from (seed, i) alone, whichever worker makes it."""

    def __init__(
        self,
        data: str,
        tokenizer: Path,
        plan: list[tuple[int, int]],
        seed: int,
        first: int,
        mix: dict[str, float],
    ) -> None:
        self.data, self.tokenizer, self.plan = data, tokenizer, plan
        self.seed, self.first, self.mix = seed, first, mix

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        me, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        seen, _ = split_rows(self.data)
        corpus = Corpus(Tokenizer.from_file(str(self.tokenizer / "tokenizer.json")), seen)
        for i in range(me, len(self.plan), workers):
            length, rows = self.plan[i]
            sampler = EpisodeSampler(corpus, self.seed, self.first + i, self.mix)
            first, second, third = batch(sampler, rows, length, length // 4)
            yield torch.from_numpy(first), torch.from_numpy(second), torch.from_numpy(third)


class Muon:
    """Momentum with orthogonalised updates for matrices; parameters of one shape are stepped together."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.005) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = list(shapes.values())
        self.state = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One step at ``scale`` times the learning rate."""
        lr = self.lr * scale
        for group, buffer in zip(self.groups, self.state, strict=True):
            tensors: list[torch.Tensor] = list(group)
            grad = torch.stack([p.grad for p in group if p.grad is not None])
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum))
            rows, columns = group[0].shape
            update = update * (-lr * max(1.0, rows / columns) ** 0.5)
            torch._foreach_mul_(tensors, 1 - lr * self.decay)
            torch._foreach_add_(tensors, list(update.to(group[0].dtype).unbind(0)))


def orthogonalise(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly, of each of x (n, rows, columns): Newton-Schulz in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16()
    wide = y.shape[-2] > y.shape[-1]
    y = y.mT if wide else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = y @ y.mT
        y = a * y + (b * s + c * s @ s) @ y
    return y.mT if wide else y


def loss_of(
    model: ReferenceLlama, tokens: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross entropy at ``positions`` (B, P) of tokens (B, T + 1), and over first tokens of labels only."""
    inputs = tokens[:, :-1]
    cos, sin = model.model.tables(inputs.shape[1], inputs.device)
    hidden = model.model(inputs, cos, sin)
    return head_loss(hidden, model.model.embed_tokens.weight, tokens, positions, weights)


def head_loss(
    hidden: torch.Tensor,
    embedding: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss from states (B, T, E); only the rows at ``positions`` meet the vocabulary."""
    picked = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
    targets = tokens.gather(1, positions + 1)
    logits = F.linear(picked, embedding.to(picked.dtype)).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    w = weights.flatten()
    label = (w == 1).float()
    return (each * w).sum() / w.sum().clamp(min=1), (each.detach() * label).sum() / label.sum().clamp(min=1)


def validation_rows(data: str, tokenizer: Path, length: int, rows: int, seed: int) -> dict[str, list[EpisodeRow]]:
    """Rows of held-out classes with random names, the label set fixed while the demonstrations grow."""
    _, unseen = split_rows(data)
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    out = {}
    for name in ("clinc150", "nlu"):
        corpus = Corpus(loaded, {name: unseen[name]})
        sampler = EpisodeSampler(corpus, seed, 1 << 40)
        for k in (10, len(corpus.classes)):
            out[f"{name}/{k}"] = [sampler.classification(length, "real", k, plain=True) for _ in range(rows)]
    # the corpus only gives the filler sentences here; a single number, asked for at the end of the row
    out["passkey"] = [sampler.passkey(length, keys=1) for _ in range(2 * rows)]
    return out


@torch.no_grad()
def accuracy(model: ReferenceLlama, rows: list[EpisodeRow], device: torch.device) -> dict[str, float]:
    """Share of labels whose every token is the most likely one, by earlier demonstrations of the class."""
    hits: dict[str, list[float]] = {f"{a}": [] for a, _ in SHOTS}
    for row in rows:
        tokens = torch.from_numpy(row.tokens.astype(np.int64)).to(device)[None]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            best = model(tokens[:, :-1]).argmax(-1)
        right = (best == tokens[:, 1:])[0].float().cpu().numpy()
        wrong = np.concatenate([[0], np.cumsum(1 - right)])
        ok = wrong[row.label_at - 1 + row.label_size] == wrong[row.label_at - 1]
        for low, high in SHOTS:
            hits[f"{low}"] += ok[(row.shots >= low) & (row.shots <= high)].tolist()
    return {k: round(float(np.mean(v)), 4) for k, v in hits.items() if v}


def save_state(out: Path, model: ReferenceLlama, muon: Muon, adam: torch.optim.Optimizer, state: JsonObject) -> None:
    """The exported model plus what resuming needs, in files of at most 15 MB each."""
    export(model, out)
    low = {
        name: (value.detach().float() - value.detach().bfloat16().float()).to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(low, str(out / "low_bits.safetensors"))
    save_file({str(i): b.to("cpu", torch.bfloat16) for i, b in enumerate(muon.state)}, str(out / "muon.safetensors"))
    torch.save(adam.state_dict(), out / "adam.pt")
    (out / "state.json").write_text(json.dumps(state, indent=2) + "\n")


def load_state(
    source: Path, model: ReferenceLlama, muon: Muon, adam: torch.optim.Optimizer, device: torch.device
) -> JsonObject:
    """Inverse of ``save_state``; without the optimizers' files only the weights are taken."""
    high = load_file(str(source / "model.safetensors"))
    low = load_file(str(source / "low_bits.safetensors")) if (source / "low_bits.safetensors").exists() else {}
    model.load_state_dict({k: v.float() + (low[k].float() if k in low else 0.0) for k, v in high.items()})
    if (source / "muon.safetensors").exists():
        saved = load_file(str(source / "muon.safetensors"))
        for i, buffer in enumerate(muon.state):
            buffer.copy_(saved[str(i)].to(device))
        adam.load_state_dict(torch.load(source / "adam.pt", map_location=device, weights_only=True))
    state_file = source / "state.json"
    return json.loads(state_file.read_text()) if state_file.exists() else {"step": 0, "tokens": 0, "seconds": 0.0}


def schedule(step: int, steps: int, warmup: int, decay: float, final: float) -> float:
    """Learning-rate factor: linear warm-up, flat, then linear to ``final`` over the last ``decay`` of the run."""
    if step < warmup:
        return (step + 1) / warmup
    begin = steps * (1 - decay)
    if step <= begin or decay == 0:
        return 1.0
    return 1.0 - (1.0 - final) * (step - begin) / (steps - begin)


def train(args: argparse.Namespace) -> None:
    """Run the phases; see the module's docstring."""
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    if args.attention == "cudnn":  # on an H200 1.6 times as fast as the default at these shapes
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
    phases = parse_phases(args.phases)
    tokenizer, out = Path(args.tokenizer), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    model = ReferenceLlama(json.loads(args.config)).to(device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, args.lr)
    adam = torch.optim.AdamW(others, lr=args.lr_embed, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda")
    state: JsonObject = {"step": 0, "tokens": 0, "seconds": 0.0}
    if args.resume:
        state = load_state(Path(args.resume), model, muon, adam, device)
        if (Path(args.resume) / "curve.jsonl").exists() and Path(args.resume).resolve() != out.resolve():
            shutil.copy(Path(args.resume) / "curve.jsonl", out / "curve.jsonl")
    mix = dict(MIX, **json.loads(args.mix))
    plan = [(length, rows) for length, rows, steps in phases for _ in range(steps)]
    if args.interleave:
        plan = [plan[i] for i in np.random.default_rng(args.seed).permutation(len(plan))]
    loader = DataLoader(
        Batches(args.data, tokenizer, plan, args.seed, state["step"], mix),
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=8 if args.workers else None,
        pin_memory=device.type == "cuda",
    )
    longest = min(max(length for length, _, _ in phases), args.validate_length)
    checks = validation_rows(args.data, tokenizer, longest, args.validate_rows, args.seed)
    head = head_loss
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        head = torch.compile(head_loss, dynamic=False)
        torch._dynamo.config.cache_size_limit = 64
    total = len(plan)
    before = state["seconds"]
    curve = (out / "curve.jsonl").open("a")
    window: list[torch.Tensor] = []
    mark, mark_tokens = time.monotonic(), state["tokens"]
    done = 0

    def remember() -> None:
        state["seconds"] = round(before + time.monotonic() - started, 1)
        state["runs"] = [*earlier_runs, dict(vars(args), steps_done=done)]
        save_state(out, model, muon, adam, state)

    earlier_runs = state.get("runs", [])
    tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for i, (tokens, positions, weights) in enumerate(loader):
        if args.minutes and time.monotonic() - started > args.minutes * 60:
            break
        length, rows = plan[i]
        tokens = tokens.to(device, non_blocking=True).long()
        positions, weights = positions.to(device, non_blocking=True), weights.to(device, non_blocking=True)
        if length not in tables:
            tables[length] = model.model.tables(length, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.model(tokens[:, :-1], *tables[length])
            loss, label_loss = head(hidden, model.model.embed_tokens.weight, tokens, positions, weights)
        loss.backward()
        factor = schedule(i, total, args.warmup, args.decay, args.final_lr)
        norm = nn.utils.clip_grad_norm_(others, 1.0)
        muon.step(factor)
        for group in adam.param_groups:
            group["lr"] = args.lr_embed * factor
        adam.step()
        model.zero_grad(set_to_none=True)
        window.append(label_loss)
        done = i + 1
        state["step"] += 1
        state["tokens"] += length * rows
        last = done == total
        if last or done % 50 == 0:
            record: JsonObject = {
                "step": state["step"],
                "length": length,
                "tokens": state["tokens"],
                "lr": round(factor, 4),
                "label_loss": round(torch.stack(window).mean().item(), 4),
                "norm": round(norm.item(), 3),
            }
            now = time.monotonic()
            record["tokens_per_s"] = int((state["tokens"] - mark_tokens) / (now - mark))
            window = []
            if last or done % args.every == 0:
                for name, rows_ in checks.items():
                    record[name] = accuracy(model, rows_, device)
            mark, mark_tokens = time.monotonic(), state["tokens"]
            record["seconds"] = round(before + now - started, 1)
            curve.write(json.dumps(record) + "\n")
            curve.flush()
            if last or done % args.print_every == 0 or done % args.every == 0:
                print(json.dumps(record), flush=True)
        if args.save_every and done % args.save_every == 0:
            remember()
    remember()
    print(f"saved {out} after step {state['step']}, {state['tokens'] / 1e6:.0f}M tokens", flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="directory with clinc150, nlu, trec and trec_fine")
    parser.add_argument("--out", required=True, help="output directory")
    parser.add_argument("--tokenizer", default=str(ASSETS), help="directory of tokenizer.json")
    parser.add_argument("--phases", default="1024x128x500,4096x32x1000", help="TOKENSxROWSxSTEPS[,...]")
    parser.add_argument("--interleave", action="store_true", help="mix the phases' steps at random")
    parser.add_argument("--resume", default="", help="an earlier output directory to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.02, help="matrices (Muon)")
    parser.add_argument("--lr-embed", type=float, default=3e-3, help="embeddings and norms (AdamW)")
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--decay", type=float, default=0.0, help="share of the run over which the rate falls")
    parser.add_argument("--final-lr", type=float, default=0.0, help="factor it falls to")
    parser.add_argument("--mix", default="{}", help=f"JSON, changes {json.dumps(MIX)}")
    parser.add_argument("--config", default="{}", help="JSON, changes of the model's configuration")
    parser.add_argument("--workers", type=int, default=12, help="processes that make episodes")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop and save after this long (0: never)")
    parser.add_argument("--every", type=int, default=500, help="steps between validations")
    parser.add_argument("--print-every", type=int, default=250, help="steps between printed lines")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (0: at the end)")
    parser.add_argument("--validate-length", type=int, default=8192, help="tokens a validation row")
    parser.add_argument("--validate-rows", type=int, default=8)
    parser.add_argument("--attention", choices=("default", "cudnn"), default="default", help="attention kernel")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser


if __name__ == "__main__":
    train(build_parser().parse_args())
