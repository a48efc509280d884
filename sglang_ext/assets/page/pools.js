
// ---- the list of pools ----

async function refresh() {
  clearTimeout(state.timer);
  if (!document.hidden) await look();
  if (state.closed) return; // until there is another key
  const busy = (state.pools || []).some((pool) => pool.status === "encoding");
  state.timer = setTimeout(refresh, busy ? SOON : LATER);
}

async function look() {
  try {
    const found = await call("GET", "v1/pools", keys.pools);
    state.closed = false;
    say(found.damaged ? `Damaged files in the folder of pools: ${found.damaged.join("; ")}` : "");
    showPools(found.pools);
    await lookAtPool();
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    if (problem.status === 401 || problem.status === 403) shut();
    else say(problem.message);
  }
}

/** The list needs a key that this page does not have. */
function shut() {
  Object.assign(state, { closed: true, pools: null, name: null, detail: null });
  $("pool").hidden = true;
  $("keys").open = !keys.pools;
  say(keys.pools
    ? "The key does not show pools. With a key that asks questions you can still ask a pool whose name you know."
    : "This server shows its pools to those who have its key. Type it in above, under “Keys”.");
  fill($("pools"), el("li", { class: "empty quiet" }, "No pools are shown without the key."));
  fill($("pool-names"));
  offerLikely();
}

function showPools(pools) {
  state.pools = pools;
  if (!pools.some((pool) => pool.name === state.name)) choose(pools.length ? pools[0].name : null);
  offerLikely();
  fill($("pool-names"), ...pools.map((pool) => el("option", { value: pool.name })));
  if (!pools.length) {
    fill($("pools"), el("li", { class: "empty" }, "There are no pools yet. This makes one:",
      el("pre", {}, "curl -X PUT ", new URL("v1/pools/tickets", location.href).href,
        " -H 'Content-Type: application/jsonl' --data-binary @tickets.jsonl")));
    return;
  }
  fill($("pools"), ...pools.map((pool) => el("li", {}, lineOf(pool))));
}

function lineOf(pool) {
  const attributes = { "data-key": pool.name, "aria-current": String(pool.name === state.name) };
  const sizes = pool.version
    ? `version ${pool.version}, ${count(pool.num_blocks, "block", "blocks")}, ${count(pool.tokens, "token", "tokens")}`
    : "no version yet";
  return el("button", { type: "button", ...attributes, onclick: () => pick(pool.name) },
    el("span", { class: "row" }, el("strong", {}, pool.name), status(pool)),
    el("span", { class: "quiet" }, sizes),
    pool.status === "encoding" ? progressOf(pool) : null);
}

function status(pool) {
  return el("span", { class: `tag ${pool.status}` }, pool.status);
}

function progressOf(pool) {
  const done = pool.progress;
  const named = done && pool.phase === "encoding"
    ? `${number.format(done.blocks_done)} of ${count(done.blocks, "block", "blocks")} encoded`
    : pool.phase || "encoding";
  const bar = el("progress", { "aria-label": `${pool.name}: ${named}` });
  if (done && pool.phase === "encoding") {
    Object.assign(bar, { max: Math.max(1, done.tokens), value: done.tokens_done });
  }
  return el("span", {}, bar, el("span", { class: "quiet" }, named));
}

// ---- one pool ----

function choose(name) {
  Object.assign(state, { name, detail: null, open: null, at: 0, allTiles: false });
  $("pool").hidden = name === null;
  $("pool-name").value = name || "";
  fill($("block"));
}

async function pick(name) {
  choose(name);
  showPools(state.pools);
  await lookAtPool();
}

async function lookAtPool() {
  const name = state.name, line = (state.pools || []).find((pool) => pool.name === name);
  if (!line) return;
  const known = state.detail;
  // The blocks of a large pool are megabytes: they are asked for when something changed.
  const same = known && known.version === line.version && known.status === line.status;
  try {
    const kept = same && line.num_blocks > TILES;
    const detail = kept ? { ...known, ...line } : await call("GET", poolPath(name), keys.pools);
    if (state.name === name) showPool(detail);
  } catch (problem) {
    if (problem.status !== 404) throw problem; // it was deleted meanwhile: the next look says so
  }
}

function showPool(detail) {
  if (state.detail && JSON.stringify(detail) === JSON.stringify(state.detail)) return;
  if (state.detail && state.detail.version !== detail.version) {
    state.at = 0;
    closeBlock();
  }
  state.detail = detail;
  const blocks = detail.blocks || [];
  fill($("pool-title"), el("span", { class: "row" }, detail.name, status(detail)));
  fill($("pool-state"),
    detail.status === "encoding" ? progressOf(detail) : null,
    detail.error ? error(detail.error) : null,
    detail.version ? null : el("p", { class: "quiet" }, "Questions wait for its first version."));
  fill($("facts"), ...(detail.version ? facts(detail, blocks) : []).flatMap(([name, value]) => [
    el("div", {}, el("dt", {}, name), el("dd", { class: "number" }, value))]));
  for (const id of ["map", "map-title", "legend"]) $(id).hidden = !blocks.length;
  showMap();
  fill($("more"), ...(detail.version ? [tableOf(blocks), labelsOf(detail), optionsOf(detail)] : []));
}

function tableOf(blocks) {
  const cells = (kind, values) => el("tr", {}, ...values.map((value) => el(kind, {}, value)));
  const sizes = (block) => [block.demonstrations.length, block.tokens, block.position].map(number.format);
  const line = (block) => cells("td",
    [block.id, ...sizes(block), block.resident ? "yes" : "no", number.format(block.hits)]);
  const rest = blocks.length > TILES ? el("p", { class: "quiet" }, `The first ${TILES} of ${blocks.length}.`) : null;
  const table = el("table", { class: "table number" },
    el("thead", {}, cells("th", ["block", "demonstrations", "tokens", "position", "in the KV cache", "hits"])),
    el("tbody", {}, ...blocks.slice(0, TILES).map(line)));
  return el("details", { "data-key": "table" }, el("summary", {}, "Blocks as a table"), table, rest);
}

function labelsOf(detail) {
  return el("details", { "data-key": "labels" }, el("summary", {}, count(detail.labels.length, "label", "labels")),
    el("div", { class: "chips" }, ...detail.labels.map((label) => el("span", { dir: "auto" }, label))));
}

function optionsOf(detail) {
  const written = (value) => (value === null ? "none" : typeof value === "string" ? value : JSON.stringify(value));
  return el("details", { "data-key": "options" }, el("summary", {}, "Options"), el("dl", { class: "options" },
    ...Object.entries(detail.options).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, written(value))])));
}

function facts(detail, blocks) {
  const here = blocks.filter((block) => block.resident).length;
  return [
    ["version", detail.version],
    ["demonstrations", number.format(detail.demonstrations)],
    ["tokens", number.format(detail.tokens)],
    ["memory", `${number.format(detail.bytes / 2 ** 20)} MiB`],
    ["in the KV cache", `${number.format(here)} of ${number.format(blocks.length)}`],
    ["hits", number.format(blocks.reduce((sum, block) => sum + block.hits, 0))],
    ["running", number.format(detail.requests_in_flight)],
  ];
}

function showMap() {
  const blocks = state.detail.blocks || [];
  const most = blocks.reduce((sum, block) => Math.max(sum, block.hits), 1);
  const used = state.used && state.used.pool === state.detail.name && state.used.version === state.detail.version
    ? new Set(state.used.blocks) : new Set();
  const shown = state.allTiles ? blocks : blocks.slice(0, TILES);
  fill($("map"), ...shown.map((block) => {
    const words = `block ${block.id}: ${count(block.demonstrations.length, "demonstration", "demonstrations")}, `
      + `${count(block.tokens, "token", "tokens")}, ${count(block.hits, "hit", "hits")}, `
      + (block.resident ? "in the KV cache" : "not in the KV cache")
      + (used.has(block.id) ? ", read by the answer" : "");
    return el("button", {
      type: "button", "data-key": `tile-${block.id}`, title: words, "aria-label": words, share: block.hits / most,
      class: `tile number${block.resident ? "" : " gone"}${used.has(block.id) ? " chosen" : ""}`,
      "aria-pressed": String(state.open === block.id), tabindex: block.id === state.at ? 0 : -1,
      onclick: () => openBlock(block.id),
    }, block.id);
  }), shown.length < blocks.length ? el("button", { type: "button", class: "link", onclick: () => {
    state.allTiles = true;
    showMap();
  } }, `all ${number.format(blocks.length)}`) : null);
}

/** The tiles are one stop of the Tab key; arrows go from one to the next. */
function walk(event) {
  const last = Math.min((state.detail?.blocks ?? []).length, state.allTiles ? Infinity : TILES) - 1;
  const to = { ArrowRight: state.at + 1, ArrowLeft: state.at - 1, Home: 0, End: last }[event.key];
  if (to === undefined || to < 0 || to > last) return;
  event.preventDefault();
  state.at = to;
  showMap();
  $("map").querySelector('[tabindex="0"]').focus();
}

function closeBlock() {
  state.open = null;
  fill($("block"));
}

async function openBlock(id) {
  const block = state.detail.blocks[id];
  if (state.open === id) {
    closeBlock();
    showMap();
    return;
  }
  state.open = state.at = id;
  showMap();
  const name = state.name;
  try {
    const found = await call("POST", poolPath(name, "select"), keys.pools, { block_ids: [id] });
    if (state.name !== name || state.open !== id) return;
    const [entry] = found.selection;
    const told = `${count(block.tokens, "token", "tokens")} at position ${number.format(block.position)}`;
    fill($("block"), el("div", { class: "panel" },
      el("div", { class: "row" }, el("strong", {}, `Block ${id}${entry.sink ? ", a sink" : ""}`),
        el("span", { class: "quiet" }, `${told}, ${count(block.hits, "hit", "hits")}`)),
      demonstrations(entry.demonstrations)));
  } catch (problem) {
    fill($("block"), error(problem.message));
  }
}

function demonstrations(items) {
  const body = el("tbody");
  const row = (item) => el("tr", {}, text("td", item.input), text("td", item.output));
  body.append(...items.slice(0, DEMONSTRATIONS).map(row));
  const table = el("table", { class: "demos" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "input"), el("th", { scope: "col" }, "output"))), body);
  if (items.length <= DEMONSTRATIONS) return table;
  const more = el("button", { type: "button", class: "link", onclick: () => {
    body.append(...items.slice(DEMONSTRATIONS).map(row));
    more.remove();
  } }, `show all ${number.format(items.length)} demonstrations`);
  return el("div", {}, table, more);
}
