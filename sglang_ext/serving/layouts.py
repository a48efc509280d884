"""From demonstrations to blocks of tokens: definitions and layouts of pools, made in a thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_ext import compat
from sglang_ext.config import PoolOptions
from sglang_ext.names import TokenizerManager
from sglang_ext.serving.channel import Channel
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.grammar import LabelCheck
from sglang_ext.serving.label_tree import LabelTokens, Tree
from sglang_ext.serving.labels import check_labels, label_tokens
from sglang_ext.serving.layout import Layout, bos, group_demonstrations, lay_out, parse_demonstrations
from sglang_ext.serving.plan import beyond_context
from sglang_ext.serving.pool import CHAT, COMPLETION, Definition, Version
from sglang_ext.serving.workers import Workers
from sglang_ext.types import Json


@dataclass(frozen=True)
class ChatHeader:
    """What a chat was rendered by.

    Attributes:
        token_ids: what stands before the demonstrations.
        options: of the pool; a version with others goes with other texts.
    """

    token_ids: tuple[int, ...]
    options: PoolOptions


class Layouts:
    """Defines pools and lays them out, for one server.

    Args:
        manager: SGLang's tokenizer manager.
        workers: threads.
        channel: to the schedulers.
        most: demonstrations of a pool.
    """

    def __init__(self, manager: TokenizerManager, workers: Workers, channel: Channel, most: int) -> None:
        self.manager, self._workers, self._channel, self._most = manager, workers, channel, most
        self._label_check: LabelCheck | None = None

    def define(self, demonstrations: Iterable[Json], options: PoolOptions, limit: int) -> Definition:
        """A new pool of demonstrations in blocks. Takes up to seconds: for `Workers.apart`."""
        items = parse_demonstrations(demonstrations, most=self._most)
        groups = group_demonstrations(items, options, self._workers.tokenizer(), limit)
        return Definition(options, {item.id: item for item in items}, tuple(map(tuple, groups)))

    def grown(self, definition: Definition, demonstrations: Iterable[Json], limit: int) -> Definition:
        """A pool's definition with demonstrations added in blocks of their own; likewise."""
        most = self._most - len(definition.demonstrations)
        items = parse_demonstrations(demonstrations, taken=definition.demonstrations, most=most)
        return definition.grown(
            items, group_demonstrations(items, definition.options, self._workers.tokenizer(), limit)
        )

    def lay_out_all(self, version: Version, old: Version | None) -> None:
        """Blocks of every variant that the pool serves: a chat's stay known when the pool is changed."""
        known = old.layouts if old is not None and version.definition.extends(old.definition) else {}
        version.layouts[COMPLETION] = self.lay_out(version.definition, known=known.get(COMPLETION))
        chat = old.layouts.get(CHAT) if old is not None else None  # read once: a request may put another in its place
        if old is not None and chat is not None and old.definition.options.system == version.definition.options.system:
            version.layouts[CHAT] = self.lay_out(version.definition, chat.header, chat if CHAT in known else None)
        for layout in version.layouts.values():
            self._check_context(version, layout)
        if self._label_check is None:
            self._label_check = LabelCheck(
                self._workers.tokenizer(),
                self.manager.model_config.vocab_size,
                self.manager.model_config.hf_eos_token_id,
                compat.resolved(self.manager.server_args).grammar_backend,
            )
        check_labels(self._label_check, version.definition, old.definition if old is not None else None)

    def lay_out(
        self, definition: Definition, header: Sequence[int] | None = None, known: Layout | None = None
    ) -> Layout:
        tokenizer = self._workers.tokenizer()
        if header is None:
            header = bos(tokenizer)
        return lay_out(
            definition.groups,
            definition.demonstrations,
            definition.options,
            tokenizer,
            header,
            self.model_name(),
            known.blocks if known else (),
        )

    def model_name(self) -> str:
        """Names the weights and cache format that block states belong to."""
        args = self.manager.server_args
        return f"{self.manager.model_path}@{args.revision}:{args.dtype}:{args.kv_cache_dtype}:{args.quantization}"

    def _check_context(self, version: Version, layout: Layout) -> None:
        """Positions must stay inside the model's context."""
        problem = beyond_context(layout, version.definition.options, self.manager.context_len)
        if problem:
            raise PoolError(f"pool {version.name!r}: {problem}")

    async def variant(self, version: Version, header: ChatHeader | None) -> str:
        """The variant behind a chat header, laid out when it is first asked for; None is the completion variant.

        Raises:
            PoolError: (409) the chat was rendered for a version that had other options.
        """
        if header is None:
            return COMPLETION
        if header.options != version.definition.options:
            raise PoolError(f"pool {version.name!r} was replaced while the chat was rendered: send it again", 409)
        known = version.layouts.get(CHAT)
        if known is None or known.header != header.token_ids:  # a template may put today's date there
            layout = await self._workers.apart(self.lay_out, version.definition, header.token_ids)
            self._check_context(version, layout)
            version.layouts[CHAT] = layout
            version.resident.discard(CHAT)
            if known is not None:
                keys = [block.key for block in known.blocks]
                self._workers.background(self._channel.ask("release", owner=version.owner, keys=keys, drop=True))
        return CHAT

    async def label_tokens(self, version: Version, lead: str, end: str) -> LabelTokens:
        """Tokens of a version's labels between `lead` and `end`: made once, beside the event loop."""
        known = version.label_tokens.get((lead, end))
        if known is None:
            known = await self._workers.apart(
                label_tokens, self._workers.tokenizer(), version.definition.labels, lead, end
            )
            version.label_tokens[lead, end] = known
        return known

    async def label_tree(self, tokens: LabelTokens) -> Tree:
        """The tree of these tokens: made once, beside the event loop."""
        if "tree" in vars(tokens):
            return tokens.tree
        return await self._workers.apart(lambda: tokens.tree)
