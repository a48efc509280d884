"""From demonstrations to blocks of tokens: definitions and layouts of pools, made in a thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_ext.config import PoolOptions
from sglang_ext.names import TokenizerManager
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.label_tree import LabelTokens, Tree
from sglang_ext.serving.labels import check_labels, label_tokens
from sglang_ext.serving.layout import Layout, bos, group_demonstrations, lay_out, parse_demonstrations
from sglang_ext.serving.metrics import TokenizerMetrics
from sglang_ext.serving.plan import beyond_context
from sglang_ext.serving.pool import CHAT, COMPLETION, Definition, HeaderUse, Version
from sglang_ext.serving.requests import CHAT_KEY
from sglang_ext.serving.shared import Shared
from sglang_ext.settings import ServerSettings
from sglang_ext.types import Json

KEPT_HEADER_TOKENS = 1_000_000  # of headers between the rendering of chats and the composition of their prompts


@dataclass(frozen=True)
class ChatHeader:
    """What a chat was rendered by.

    Attributes:
        token_ids: what stands before the demonstrations.
        options: of the pool; a version with others goes with other texts.
        own: whether the request brought some of it, and other chats over the pool have another one.
    """

    token_ids: tuple[int, ...]
    options: PoolOptions
    own: bool = False

    @cached_property
    def name(self) -> str:
        """Of this header, and of the variant behind it where it is a chat's own."""
        return "header:" + hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()


class Layouts:
    """Defines pools and lays them out, for one tenant.

    Args:
        manager: SGLang's tokenizer manager.
        shared: threads, the way to the schedulers, and what looks at labels.
        settings: of the server.
        metrics: count the headers of chats' own.
        tenant: whose pools they are, or "": equal blocks of two tenants have different names, and are encoded twice.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        shared: Shared,
        settings: ServerSettings,
        metrics: TokenizerMetrics,
        tenant: str = "",
    ) -> None:
        self.manager, self._shared, self._settings, self._tenant = manager, shared, settings, tenant
        self._workers, self._channel, self._metrics = shared.workers, shared.channel, metrics
        self._headers: dict[str, ChatHeader] = {}  # by name, the one that was rendered last last
        self._header_tokens = 0
        self._keeping = threading.Lock()  # a long chat is rendered in a thread, beside those of the event loop

    def define(self, demonstrations: Iterable[Json], options: PoolOptions, limit: int) -> Definition:
        """A new pool of demonstrations in blocks. Takes up to seconds: for `Workers.apart`."""
        items = parse_demonstrations(demonstrations, most=self._settings.max_demonstrations)
        groups = group_demonstrations(items, options, self._workers.tokenizer(), limit)
        return Definition(options, {item.id: item for item in items}, tuple(map(tuple, groups)))

    def grown(self, definition: Definition, demonstrations: Iterable[Json], limit: int) -> Definition:
        """A pool's definition with demonstrations added in blocks of their own; likewise."""
        most = self._settings.max_demonstrations - len(definition.demonstrations)
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
        check_labels(self._shared.label_check, version.definition, old.definition if old is not None else None)

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
        """Names the weights, the cache format and the tenant that block states belong to."""
        args = self.manager.server_args
        model = f"{self.manager.model_path}@{args.revision}:{args.dtype}:{args.kv_cache_dtype}:{args.quantization}"
        return f"{model}|tenant:{self._tenant}" if self._tenant else model

    def _check_context(self, version: Version, layout: Layout) -> None:
        """Positions must stay inside the model's context."""
        problem = beyond_context(layout, version.definition.options, self.manager.context_len)
        if problem:
            raise PoolError(f"pool {version.name!r}: {problem}")

    def keep_header(self, header: ChatHeader) -> str:
        """Keep what a chat was rendered by until its prompt is composed; returns the name to find it by.

        SGLang passes nothing on to there but JSON. What was rendered long ago is forgotten.

        Raises:
            PoolError: (413) the chat's own header is too long.
        """
        tokens, most = len(header.token_ids), self._settings.max_header_tokens
        if header.own and tokens > most:
            raise PoolError(
                f"what stands before the demonstrations (system prompt, developer message, tools) has {tokens} tokens;"
                f" the server encodes a pool behind at most {most} (--max-header-tokens): shorten it",
                413,
            )
        with self._keeping:
            if self._headers.pop(header.name, None) is None:
                self._header_tokens += tokens
            self._headers[header.name] = header
            while self._header_tokens > KEPT_HEADER_TOKENS and len(self._headers) > 1:
                oldest = next(iter(self._headers))
                self._header_tokens -= len(self._headers.pop(oldest).token_ids)
        return header.name

    def header(self, name: Json) -> ChatHeader:
        """What `keep_header` keeps under a name; ValueError where it is a client's."""
        with self._keeping:
            found = self._headers.get(name) if isinstance(name, str) else None
        if found is None:
            raise ValueError(f"custom_params: unknown option {CHAT_KEY}")
        return found

    async def variant(self, version: Version, header: ChatHeader | None) -> str:
        """The variant behind a chat header, laid out when it is first asked for; None is the completion variant.

        A request's own header counts as used by it until its lease ends.

        Raises:
            PoolError: (409) the chat was rendered for a version that had other options; (429) requests run on as many
                own headers as the pool may have.
        """
        if header is None:
            return COMPLETION
        if header.options != version.definition.options:
            raise PoolError(f"pool {version.name!r} was replaced while the chat was rendered: send it again", 409)
        if header.own:
            return await self._own_variant(version, header)
        known = version.layouts.get(CHAT)
        if known is None or known.header != header.token_ids:  # a template may put today's date there
            layout = await self._workers.apart(self.lay_out, version.definition, header.token_ids)
            self._check_context(version, layout)
            version.layouts[CHAT] = layout
            version.resident.discard(CHAT)
            if known is not None:
                self._let_go(version, known)
        return CHAT

    async def _own_variant(self, version: Version, header: ChatHeader) -> str:
        """The variant behind a request's own header, which is used by one more request."""
        name = header.name
        if name not in version.headers:
            self._make_room(version)
            layout = await self._workers.apart(self.lay_out, version.definition, header.token_ids)
            self._check_context(version, layout)
            if name not in version.headers:  # else another request was faster
                self._make_room(version)
                version.layouts[name], version.headers[name] = layout, HeaderUse()
                self._metrics.laid_out(version.name)
        use = version.headers.pop(name)
        version.headers[name] = use  # the last one used
        use.users, use.requests = use.users + 1, use.requests + 1
        return name

    def _make_room(self, version: Version) -> None:
        """Have the header of requests' own that was longest not used give way, where there are as many as may be."""
        if len(version.headers) < self._settings.max_headers:
            return
        unused = next((name for name, use in version.headers.items() if not use.users), None)
        if unused is None:
            raise PoolError(
                f"requests run on {len(version.headers)} headers of their own (system prompts, developer messages,"
                f" tools) of pool {version.name!r}, as many as the server encodes it behind at one time"
                f" (--max-headers {self._settings.max_headers}): retry, or leave them out",
                429,
            )
        del version.headers[unused]
        self._let_go(version, version.layouts.pop(unused))

    def _let_go(self, version: Version, layout: Layout) -> None:
        """Free the blocks of a layout that a version has no longer, but not those that another layout of it has."""
        kept = {block.key for other in version.layouts.values() for block in other.blocks}
        keys = [block.key for block in layout.blocks if block.key not in kept]
        self._workers.background(self._channel.ask("release", owner=version.owner, keys=keys, drop=True, gone=keys))

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
