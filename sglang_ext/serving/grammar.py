"""Constraining an answer to a pool's labels, with SGLang's grammar backend."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xgrammar

from sglang_ext.names import Tokenizer
from sglang_ext.serving.layout import encode_texts
from sglang_ext.types import JsonObject, Options

MOST_CHARACTERS = 1_000_000  # of a pool's labels together: their grammar is compiled in seconds

CONSTRAIN = 'constrain="labels"'

_OTHERS = ("regex", "json_schema", "ebnf", "structural_tag")


def label_grammar(labels: Sequence[str], lead: str, end: str) -> str:
    """An EBNF grammar of `lead`, one label, and `end`: a tree of what labels share.

    What follows a label in the demonstrations (`end`) is part of the grammar: where one label begins another ("card",
    "card lost"), it is what tells the model's choice apart. A plain list of alternatives takes xgrammar 50 times as
    long to compile (5,000 labels), and each token 100 times as long to check.

    Args:
        labels: at least one.
        lead: the white space an answer starts with.
        end: template text and separator after an output; may be empty, then only end-of-sequence ends a label.
    """
    if not labels:
        raise ValueError("the pool has no labels to constrain to")
    return _grammar(tuple(labels), lead, end).ebnf


@dataclass(frozen=True)
class _LabelGrammar:
    """What all requests need that ask for one of the same labels.

    Attributes:
        ebnf: their grammar.
        longest: bytes of the longest text that it takes.
        ends_late: whether a label has the end in itself: as a stop string it would end an answer inside of it.
    """

    ebnf: str
    longest: int
    ends_late: bool


@functools.lru_cache(maxsize=16)  # every request of a pool asks for the same one
def _grammar(labels: tuple[str, ...], lead: str, end: str) -> _LabelGrammar:
    longest = max(len((lead + label + end).encode()) for label in labels)
    ends_late = any((lead + label + end).find(end) != len(lead + label) for label in labels)
    return _LabelGrammar(_ebnf(labels, lead, end), longest, ends_late)


def _ebnf(labels: tuple[str, ...], lead: str, end: str) -> str:
    rules: list[str] = []
    waiting = [("root", sorted({lead + label + end for label in labels}))]
    names = 0
    while waiting:
        name, texts = waiting.pop()
        choices = []
        for shared, rests in _forks(texts):
            literal = json.dumps(shared, ensure_ascii=False)
            if rests == [""]:
                choices.append(literal)
                continue
            names += 1
            choices.append(f"{literal} r{names}")
            waiting.append((f"r{names}", rests))
        rules.append(f"{name} ::= {' | '.join(choices)}")
    return "\n".join(rules)


def _forks(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(the longest common beginning, what follows it in each) of sorted texts with the same first character."""
    found = []
    first = 0
    while first < len(texts):
        end = first + 1
        while end < len(texts) and texts[end][:1] == texts[first][:1]:
            end += 1
        shared = _common(texts[first], texts[end - 1])
        found.append((shared, [text[len(shared) :] for text in texts[first:end]]))
        first = end
    return found


def _common(first: str, last: str) -> str:
    """The longest common beginning."""
    length = 0
    for one, other in zip(first, last, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]


def refuse_others(params: Options, option: str) -> None:
    """ValueError where a request that asks for a label (`option`) has a constraint of its own."""
    for name in _OTHERS:
        if params.get(name):
            raise ValueError(f"{option} and {name} are both given: choose one")


def constrain(
    params: JsonObject,
    labels: tuple[str, ...],
    lead: str,
    end: str,
    backend: str | None,
    option: str = CONSTRAIN,
    instead: str = "leave out constrain (label_probs works without)",
) -> str:
    """Set SGLang's sampling parameters so that the answer is one of `labels`; greedy unless a temperature is given.

    Args:
        backend: the server's grammar backend.
        option: of the request, which asks for this.
        instead: what the request can do where the server has no grammar backend.

    Returns:
        What SGLang leaves at the end of the answer's text and is no part of it.

    Raises:
        ValueError: the server has no grammar backend, the request has a constraint of its own, or the labels are more
            than a grammar takes.
    """
    refuse_others(params, option)
    if backend in (None, "none"):
        raise ValueError(
            f"{option}: this server runs --grammar-backend none and cannot constrain an answer; start it with"
            f" --grammar-backend xgrammar, or {instead}"
        )
    size = sum(map(len, labels))
    if size > MOST_CHARACTERS:
        raise ValueError(
            f"{option}: the pool's {len(labels)} labels have {size} characters, a grammar takes at most"
            f" {MOST_CHARACTERS}: use fewer or shorter labels, or {instead}"
        )
    grammar = _grammar(labels, lead, end)
    params["ebnf"] = grammar.ebnf
    if params.get("temperature") is None:
        params["temperature"] = 0.0
    # The grammar ends the answer. A token is a byte at least, and one more ends the sequence; another one, and the
    # answer never ends by its length, which SGLang looks at first.
    params["max_new_tokens"] = max(params.get("max_new_tokens") or 0, grammar.longest + 2)
    if not end:
        return ""
    if grammar.ends_late:
        return end
    stops = params.get("stop") or []
    params["stop"] = [*([stops] if isinstance(stops, str) else stops), end]
    return ""


class Ending:
    """Takes the end of the demonstrations off an answer's text, which may come in parts."""

    def __init__(self, end: str) -> None:
        self.end = end
        self._text = ""
        self._shown = 0

    def whole(self, text: str, reason: JsonObject | None) -> str:
        """What is shown of all the text so far; what may yet turn out to be the end is held back.

        Args:
            reason: why the answer is complete, or None while it goes on.
        """
        if reason is None:
            first = max(0, len(text) - len(self.end))
            held = next(at for at in range(first, len(text) + 1) if self.end.startswith(text[at:]))
            return text[:held]
        by_grammar = reason.get("type") == "stop" and not isinstance(reason.get("matched"), str)
        return text.removesuffix(self.end) if by_grammar else text

    def part(self, text: str, reason: JsonObject | None) -> str:
        """What is shown anew when `text` follows the parts so far."""
        self._text += text
        shown = self.whole(self._text, reason)
        begin, self._shown = self._shown, len(shown)
        return shown[begin:]


class LabelCheck:
    """Whether a server can answer with given labels: asked when a pool is created, and not by the first client.

    Args:
        tokenizer: of the model, for this object alone.
        vocab_size: of the model.
        stop_ids: tokens that end an answer.
        backend: the server's grammar backend; what others than xgrammar can spell is not looked at.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Iterable[int] | None, backend: str | None
    ) -> None:
        self.tokenizer, self.vocab_size, self.backend = tokenizer, vocab_size, backend
        self.stop_ids = sorted(stop_ids) if stop_ids else None
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {str(token.content): id for id, token in added.items() if token.special}

    def check(self, labels: Sequence[str], lead: str, end: str) -> None:
        """Raise ValueError, naming the label, where a label could not be the answer.

        Args:
            labels: not looked at before.
            lead, end: white space before, and what ends an answer, as `label_grammar` has them.
        """
        for label in labels:
            for token in self.special:
                if token in label:
                    raise ValueError(
                        f"output {_short(label)} contains {token!r}, a special token of the model's tokenizer: it would"
                        " never be seen in an answer's text; write the label in other words"
                    )
        if self.backend != "xgrammar" or not labels or sum(map(len, labels)) > MOST_CHARACTERS:
            return
        info, compiler = self._info, self._compiler
        if info is None or compiler is None:
            return  # SGLang's own backend gives up on such a tokenizer, and says so to every constrained request
        texts = [lead + label + end for label in labels]
        matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(label_grammar(labels, lead, end)))
        encoded = encode_texts(self.tokenizer, texts, lambda encoding: encoding.ids)
        for label, text, plain in zip(labels, texts, encoded, strict=True):
            spelled = b"".join(self._decoded[id] for id in plain)
            ids = plain if spelled == text.encode() else self._spell(text)
            if ids is None or not self._accepts(matcher, ids):
                raise ValueError(
                    f"the server's grammar (xgrammar) cannot spell the output {_short(label)} with this model's"
                    f" tokenizer, which it takes for one of kind {info.vocab_type.name}: an answer constrained to the"
                    " pool's labels would end in the middle; start the server with another --grammar-backend"
                    " (llguidance, outlines, none)"
                )

    @functools.cached_property
    def _info(self) -> xgrammar.TokenizerInfo | None:
        """What SGLang's backend for xgrammar makes of the tokenizer; None where it makes nothing of it."""
        try:
            if hasattr(self.tokenizer, "init_xgrammar"):
                info: xgrammar.TokenizerInfo | None = self.tokenizer.init_xgrammar()[0]
                return info
            return xgrammar.TokenizerInfo.from_huggingface(
                self.tokenizer, vocab_size=self.vocab_size, stop_token_ids=self.stop_ids
            )
        except Exception:
            return None

    @functools.cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler | None:
        return None if self._info is None else xgrammar.GrammarCompiler(self._info, cache_enabled=False)

    @functools.cached_property
    def _decoded(self) -> list[bytes]:
        """Bytes of every token, as xgrammar has them; it makes the list anew whenever it is asked."""
        return list(self._info.decoded_vocab) if self._info is not None else []

    @functools.cached_property
    def _pieces(self) -> dict[bytes, int]:
        """Bytes of a token, as xgrammar has them -> the token; special ones and those that end an answer left out."""
        info = self._info
        if info is None:
            return {}
        left_out = {*info.stop_token_ids, *info.special_token_ids, *self.special.values()}
        return {piece: id for id, piece in enumerate(self._decoded) if piece and id not in left_out}

    def _spell(self, text: str) -> list[int] | None:
        """Tokens that spell a text in xgrammar's view and in the tokenizer's, or None.

        Asked where the text's own tokens do not: a tokenizer may put a space before every text, say.
        """
        whole, longest = text.encode(), max(map(len, self._pieces), default=0)
        reached: dict[int, tuple[int, int]] = {0: (0, -1)}  # end -> (begin, token)
        for begin in range(len(whole)):
            if begin in reached:
                for end in range(begin + 1, min(len(whole), begin + longest) + 1):
                    if whole[begin:end] in self._pieces:
                        reached[end] = (begin, self._pieces[whole[begin:end]])
        if len(whole) not in reached:
            return None
        ids: list[int] = []
        at = len(whole)
        while at:
            at, token = reached[at]
            ids.append(token)
        ids.reverse()
        read = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return ids if read.strip() == text.strip() else None

    def _accepts(self, matcher: xgrammar.GrammarMatcher, ids: Sequence[int]) -> bool:
        """Whether the tokens are one answer of the grammar: each accepted, and then its end."""
        matcher.reset()
        info = self._info
        if not all(matcher.accept_token(id) for id in ids):
            return False
        return matcher.is_terminated() or (info is not None and matcher.accept_token(info.stop_token_ids[0]))


def _short(label: str) -> str:
    """A label as it is quoted in an error."""
    return repr(label if len(label) <= 60 else label[:57] + "...")
