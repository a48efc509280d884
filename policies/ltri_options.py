"""Settings of Ltri-LLM; apart from the method, so that a command line can be checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from sglang_ext.policies.clustering import CHOICES

SIMILARITIES = ("sum", "max", "mass")
RATIOS = ("row", "col", "rowcol")
VOTES = ("inclusive", "preceding", "off")
ASKING = ("tokens", "spans")
INDEXES = ("ltri", "infllm", "mean", "random", "given")
REPRESENTATIVES = 4
"""Tokens that stand for a block in InfLLM's index (Xiao et al., 2024, section 3.2)."""
PAPERS_VECTORS = 12
"""Index vectors of a block (Tang et al., 2024)."""
MOST_PACKED, LEAST_MIXED = 256, 64
"""Components of an index vector in 4 bits, at most, and how many of them a Hadamard matrix mixes by default, at least:
with fewer, a large one leaves less of the others."""
LEAST = {"sinks": 0, "window": 1, "block": 1, "chunk": 1, "last": 1, "retrieved": 0, "spans": 1, "queries": 1}
LEAST |= {"early_layers": 0, "renewed": 0, "askers": 1}
"""Setting that is a whole number -> the smallest that it may be."""


@dataclass(frozen=True)
class Ltri:
    """How a prompt is read, what is remembered of it, and how that is found again (Ltri-LLM, sections 3 and 4).

    Attributes:
        sinks: first tokens, which every chunk sees (the paper: 128).
        window: each chunk sees at least this many tokens directly before it (4,096). Without `far`, a token that is
            farther than `window - 1` is seen at that distance.
        block: tokens of a memory block, which leave the window together and come back together (128).
        chunk: tokens of a prompt that are computed together (512); a multiple of `block`.
        last: tokens at the end of a prompt that are a chunk of their own (section 5: 32), so that what it retrieves is
            what the question asks for.
        retrieved: blocks that a layer gets back for a chunk (16).
        cached: blocks of a stream that a layer keeps on the GPU once it has got them back; the least recently used
            leave first (32). Left out, they are twice `retrieved`; fewer leave room for more streams.
        spans: spans of a block, at most (1; the paper has 4, and 6 for RULER). With one, more is found in our study.
        vectors: index vectors of a block, at most (the paper: 12, and 24 for RULER). Left out, they are three eighths
            of `block`, because one span with fewer finds less; where all heads of a layer vote, whose vectors are that
            much longer, at most 12.
        queries: of each `block` tokens of a chunk, how many are compared with what is remembered, at most; their spans
            share them (12; the paper: as many as `vectors`). Of a prompt's last tokens, `asking` says which.
        theta: share of the entries of a head's tile that lie below the threshold (equation 5; the 90th percentile).
        phi: intersection over union above which the lower-scoring of two spans is dropped (0.1; for RULER 0.01).
        boxes: compare spans as the squares that they are in the attention map (as torchvision would), and not as
            intervals of tokens.
        ratio: neighbours of a span that its mass is compared with (section 3.3.2): the tokens before it that its rows
            attend to (`row`), the rows behind it that attend to its tokens (`col`), or both (`rowcol`).
        rate: λ of equation 7 (3): with a larger one a span gets fewer index vectors.
        early_rate: λ of the first `early_layers` layers (20).
        early_layers: how many layers these are (4).
        index: what is remembered of a block: its spans (`ltri`); the mean key of its most attended tokens (`infllm`);
            or the mean key of all of its tokens (`mean`). The last two compare it with a chunk's mean query. Two
            baselines remember nothing: each layer retrieves blocks at random (`random`), or every layer gets those that
            the request names (`given`; `blocks` in `custom_params` is a list of their numbers).
        similarity: of two spans' index vectors: the largest of all products (`max`); their `sum` (equation 8, the
            paper's), which finds less in our study; or the attention that the queries give to the span's vectors among
            all of them (`mass`), which takes kernels twice as long, and fifteen times where they are not those in CUDA
            (docs/gpu.md). A prompt's last tokens are compared as `asking` says.
        asking: with index `ltri`, what of a prompt's last tokens (`last`) is compared with what is remembered.
            `tokens`: the queries of the last `askers` of them, each by the attention that it gives to a span's vectors
            among all vectors, as in `mass`; with similarity `sum`, which remembers sums alone, by its product. `spans`
            (the paper): what other chunks compare, too, the queries of the tokens that stand for their spans. The token
            that asks for the answer is seldom one of these, because a token stands for a span by the attention that it
            receives.
        askers: with asking `tokens`, how many tokens ask at the end of the chunk that has a prompt's last ones, or of
            both where a multiple of `chunk` cuts that chunk in two. With more, tokens before a short question ask, too,
            for what is like them. All tokens of the chunk see what is found. The paper has no such number.
        vote: what a layer retrieves: what the layers up to it vote for, itself included (`inclusive`) or not
            (`preceding`), or its own choice (`off`).
        heads: the file of `sglang-ext heads` that says which head votes in a layer, or `all`: then all heads of every
            layer vote, and their similarities are summed. Left out, it is the file of this package for the model where
            there is one, and `all` otherwise.
        persist: keep what the last chunk of the prompt retrieved through the answer (section 4); else each token of the
            answer retrieves anew.
        far: see tokens that lie `window` or more tokens back at their true distance, for which the model must have been
            trained, and not at the distance `window - 1`.
        renewed: for measurements: with each chunk, this many of the blocks that come back are replaced by others, and
            the rest stay, whatever is voted for. With 0, the votes decide, as in the method.
        four_bits: keep index vectors in 4 bits a component, rotated before, with one scale for each span, and not in
            the dtype of the keys: a quarter of the memory of the GPU. Left out, they are kept so where one head votes
            in a layer, a head's components are a multiple of 64 and at most 256, and the similarity is not `sum`, which
            remembers one vector for a span.
        host_gb: host memory, in GiB, for what leaves the windows of all streams, on all ranks together. Left out, it is
            a quarter of the machine's memory, and at most half of what is free; kernels then use only as many blocks of
            it as the GPU has room to index.

    Raises:
        ValueError: a value out of its range, or settings that do not go together.
    """

    sinks: int = 128
    window: int = 4096
    block: int = 128
    chunk: int = 512
    last: int = 32
    retrieved: int = 16
    cached: int | None = None
    spans: int = 1
    vectors: int | None = None
    queries: int = 12
    theta: float = 0.9
    phi: float = 0.1
    boxes: bool = False
    ratio: str = field(default="row", metadata={CHOICES: RATIOS})
    rate: float = 3.0
    early_rate: float = 20.0
    early_layers: int = 4
    index: str = field(default="ltri", metadata={CHOICES: INDEXES})
    similarity: str = field(default="max", metadata={CHOICES: SIMILARITIES})
    asking: str = field(default="tokens", metadata={CHOICES: ASKING})
    askers: int = 8
    vote: str = field(default="inclusive", metadata={CHOICES: VOTES})
    heads: str | None = None
    persist: bool = True
    far: bool = False
    renewed: int = 0
    four_bits: bool | None = None
    host_gb: float | None = None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
        choices = {"ratio": RATIOS, "index": INDEXES, "similarity": SIMILARITIES, "asking": ASKING, "vote": VOTES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        if not 0 < self.theta < 1 or not 0 <= self.phi < 1:
            raise ValueError(f"theta={self.theta}, phi={self.phi}: expected 0 < theta < 1 and 0 <= phi < 1")
        if self.rate < 0 or self.early_rate < 0:
            raise ValueError(f"rate={self.rate}, early_rate={self.early_rate}: expected at least 0")
        if self.host_gb is not None and not 0 < self.host_gb < float("inf"):
            raise ValueError(f"host_gb={self.host_gb}: expected more than 0 GiB")
        if self.cached is not None and (
            isinstance(self.cached, bool) or not isinstance(self.cached, int) or self.cached < self.retrieved
        ):
            raise ValueError(
                f"cached={self.cached!r}: expected a whole number of at least retrieved={self.retrieved}, which a chunk"
                " sees together"
            )
        if self.renewed > self.retrieved:
            raise ValueError(f"renewed={self.renewed}, retrieved={self.retrieved}: expected at most what a layer gets")
        if self.chunk % self.block:
            raise ValueError(f"chunk={self.chunk}, block={self.block}: expected a chunk of whole blocks")
        if self.window < self.chunk:
            raise ValueError(f"window={self.window}, chunk={self.chunk}: expected a window of at least a chunk")
        if not isinstance(self.four_bits, bool | None):
            raise ValueError(f"four_bits={self.four_bits!r}: expected true or false")
        if self.four_bits and not self._packable:
            raise ValueError(
                f"four_bits={self.four_bits}, index={self.index!r}, similarity={self.similarity!r}: expected index "
                "'ltri' with similarity 'max' or 'mass', since others keep one vector for a span; leave four_bits out"
            )
        if self.last > self.chunk:
            raise ValueError(f"last={self.last}, chunk={self.chunk}: expected at most a chunk")
        if not isinstance(self.vectors, int | None) or isinstance(self.vectors, bool) or self.most_vectors < 1:
            raise ValueError(
                f"vectors={self.vectors!r}, spans={self.spans}: expected a whole number of at least one for each span"
            )

    @property
    def ways(self) -> int:
        """Blocks that a layer keeps on the GPU for a stream."""
        return 2 * self.retrieved if self.cached is None else self.cached

    @property
    def most_vectors(self) -> int:
        """Index vectors of a span, at most."""
        return (max(self.spans, self.block * 3 // 8) if self.vectors is None else self.vectors) // self.spans

    @property
    def most_queries(self) -> int:
        """Tokens of a chunk's span that are compared with what is remembered, at most."""
        return min(self.most_vectors, max(1, self.queries // self.spans))

    @property
    def packs(self) -> bool:
        """Whether index vectors are kept in 4 bits a component."""
        return self._packable and self.four_bits is not False

    @property
    def _packable(self) -> bool:
        return self.index == "ltri" and self.similarity != "sum"

    def of_one_head(self, dim: int) -> Ltri:
        """The same settings where one head of a layer votes, and an index vector has its `dim` components.

        Raises:
            ValueError: `four_bits` is true, and `dim` is odd, so that components cannot share bytes in twos, or larger
                than kernels take.
        """
        if self.four_bits and (dim % 2 or dim > MOST_PACKED):
            raise ValueError(
                f"four_bits=True, and heads of {dim} components: expected an even number of at most {MOST_PACKED};"
                " leave four_bits out (--policy)"
            )
        mixes = dim % LEAST_MIXED == 0 and dim <= MOST_PACKED
        return replace(self, four_bits=self._packable and mixes) if self.four_bits is None else self

    def of_all_heads(self) -> Ltri:
        """The same settings where all heads of a layer vote: an index vector has the components of all of them.

        Raises:
            ValueError: `four_bits` is true, for which one head of a layer must vote.
        """
        if self.four_bits:
            raise ValueError(
                "four_bits=True, and all heads of a layer vote: expected a file that says which head does; make one"
                " with sglang-ext heads, and name it as heads (--policy), or leave four_bits out"
            )
        vectors = self.vectors
        if vectors is None:
            vectors = max(self.spans, min(self.block * 3 // 8, PAPERS_VECTORS))
        return replace(self, vectors=vectors, four_bits=False)

    def rate_of(self, layer: int) -> float:
        """λ of a layer."""
        return self.early_rate if layer < self.early_layers else self.rate

    def cut(self, begin: int, end: int, prompt: int) -> int:
        """The last place in (begin, end] where a chunk ends; `begin` where none does.

        Chunks of a prompt end at multiples of `chunk`, `last` tokens before its end, and at its end. Behind that each
        token is a chunk of its own.

        Args:
            begin: first token, where a chunk begins.
            end: behind the last token that there is room for.
            prompt: behind the last token of the prompt.
        """
        if end >= prompt:
            return end
        ends = [end // self.chunk * self.chunk, *([prompt - self.last] if prompt - self.last <= end else [])]
        return max(begin, *ends)

    def alike(self, begin: int, prompt: int) -> bool:
        """Whether the state of a stream before token `begin` follows from the tokens before it alone.

        It does where all chunks up to there ended at multiples of `chunk`, and not at the prompt's end. A block must
        end there, too: so no part of a block's attention map belongs to the state.

        Args:
            begin: where a chunk begins.
            prompt: tokens of the prompt, the first of its stream.
        """
        return 0 < begin <= prompt - self.last and begin % self.chunk == 0 and (begin - self.sinks) % self.block == 0

    def chunks(self, begin: int, end: int, prompt: int) -> list[tuple[int, int]]:
        """The chunks of the tokens [begin, end) of a stream whose newest prompt ends before token `prompt`.

        Raises:
            ValueError: no chunk ends at `end`: a part of one retrieves other blocks than the whole.
        """
        if self.cut(begin, end, prompt) != end:
            raise ValueError(
                f"tokens [{begin}, {end}) of a stream whose prompt ends at {prompt}: expected whole chunks, which end"
                f" at multiples of {self.chunk}, at {prompt - self.last} and at {prompt}; see Ltri.cut"
            )
        cuts = {*range((begin // self.chunk + 1) * self.chunk, min(end, prompt), self.chunk)}
        cuts |= {*range(max(begin + 1, prompt), end)}
        if begin < prompt - self.last < end:
            cuts.add(prompt - self.last)
        return list(pairwise([begin, *sorted(cuts), end]))

    @property
    def tokens_ask(self) -> bool:
        """Whether some of a prompt's last tokens are compared with what is remembered (`asking`)."""
        return self.index == "ltri" and self.asking == "tokens"

    @property
    def most_askers(self) -> int:
        """Tokens of one chunk that ask for themselves, at most."""
        return min(self.askers, self.last)

    def ending(self, begin: int, prompt: int) -> bool:
        """Whether a chunk that begins at `begin` has a prompt's last tokens alone, or a token behind them.

        Args:
            begin: its first token.
            prompt: behind the last token of the prompt.
        """
        return begin >= prompt - self.last

    def compared_by(self, tokens_ask: bool) -> str:
        """The similarity by which a chunk is compared with what is remembered, if its tokens ask, or else its spans."""
        return "mass" if tokens_ask and self.similarity != "sum" else self.similarity

    @property
    def remembers(self) -> bool:
        """Whether blocks are found by what is remembered of them."""
        return self.index not in ("random", "given")

    def evicted(self, before: int) -> int:
        """How many blocks, counted from behind the sinks, have left the window of a chunk that begins at `before`."""
        return max(0, (before - self.sinks - self.window) // self.block)

    def longest(self, blocks: int) -> int:
        """Tokens of the longest stream of which no more than so many blocks leave the window.

        The token that overlap scheduling computes past the end of an answer counts among them.
        """
        return self.sinks + self.window + (blocks + 1) * self.block

    @property
    def ends_blocks(self) -> bool:
        """Whether blocks end where whole chunks end: the sinks, before the first block, are as long as whole blocks."""
        return self.sinks % self.block == 0

    @property
    def alike_from(self) -> int | None:
        """First token of the first chunk that does what all whole chunks behind it do; None where chunks differ.

        With each of these chunks, as many blocks leave the same places of the window; `retrieved` or more have left.
        """
        if not self.remembers or self.far or not self.ends_blocks or self.last == self.chunk:
            return None
        if self.renewed and self.retrieved & (self.retrieved - 1):
            return None  # the number of blocks that `renewed_blocks` names grows with the stream
        behind = self.sinks + self.window + max(self.chunk, self.retrieved * self.block)
        return -(-behind // self.chunk) * self.chunk

    def blocks(self, end: int) -> int:
        """How many blocks have one of the tokens [0, end)."""
        return -(-max(0, end - self.sinks) // self.block)

    def local(self, before: int) -> int:
        """First token of the window of a chunk that begins at `before`: behind the sinks and all evicted blocks."""
        return min(before, self.sinks) + self.evicted(before) * self.block

    def first(self, block: int) -> int:
        """The first token of a block."""
        return self.sinks + block * self.block

    @property
    def slots(self) -> int:
        """KV slots of a stream: sinks, and what a chunk sees of the window, itself included."""
        return self.sinks + self.window + self.block + self.chunk


@dataclass(frozen=True)
class InfLlmOptions(Ltri):
    """`--policy` of `--attention-backend infllm`: another index, and every layer chooses by itself with all heads."""

    index: str = field(default="infllm", metadata={CHOICES: INDEXES})
    vote: str = field(default="off", metadata={CHOICES: VOTES})
    heads: str | None = "all"
