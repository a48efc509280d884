
// ---- a question ----

function selects() {
  return { ratio: Number($("ratio").value), retriever: $("retriever").value, granularity: $("granularity").value };
}

/** The most likely label can be asked for where the pool is known to have labels. */
function offerLikely() {
  const name = $("pool-name").value.split("@")[0]; // a version may stand behind it
  if (!name || document.activeElement === $("pool-name")) return; // it is still to be typed
  const line = (state.pools || []).find((pool) => pool.name === name);
  const offered = Boolean(line && line.labels && line.labels.length);
  Object.assign($("likely"), { hidden: !offered, disabled: !offered }); // some browsers show what is hidden
  if (!offered && $("constrain").value === "likely") $("constrain").value = "labels";
}

function body(explain) {
  const custom = { pool: $("pool-name").value, ...selects(), label_probs: $("probs").checked };
  const wanted = $("constrain").value;
  if (wanted === "likely") custom.choose = wanted;
  else if (wanted) custom.constrain = wanted;
  if (explain) custom.explain = true;
  if ($("report").checked && !$("report-label").hidden) custom.attention_report = true;
  return {
    text: $("question").value,
    sampling_params: { temperature: 0, max_new_tokens: Number($("longest").value), custom_params: custom },
  };
}

async function ask(event) {
  event.preventDefault();
  const button = $("ask-form").querySelector("button.primary"), begin = performance.now();
  button.disabled = true;
  fill($("result"), el("p", { class: "quiet", role: "status" }, "The server is answering …"));
  try {
    const answer = await answered();
    const seconds = (performance.now() - begin) / 1000;
    const used = answer.meta_info.sglang_ext;
    state.used = used;
    const selected = used.selection ? { ...used, note: "" } : await selectedBeside(used);
    showAnswer(answer, selected, seconds);
    if (state.detail) showMap();
    if (!state.closed) refresh();
  } catch (problem) {
    fill($("result"), error(problem.message));
  } finally {
    button.disabled = false;
  }
}

/** The answer, with what it selected where this key may read the pool. */
async function answered() {
  try {
    return await call("POST", "generate", keys.ask, body(true));
  } catch (problem) {
    if (problem.status !== 403) throw problem;
    return await call("POST", "generate", keys.ask, body(false));
  }
}

/** What the question selects, asked with the other key: on a server with two, the key that asks may not read pools. */
async function selectedBeside(used) {
  if (state.pools === null) {
    return { note: "Your key may not read this pool, so scores and demonstrations are not shown." };
  }
  const asked = { text: $("question").value, ...selects() };
  let found;
  try {
    found = await call("POST", poolPath(used.pool, "select"), keys.pools, asked);
  } catch (problem) { // the answer is there all the same
    return { note: `What was selected could not be asked for: ${problem.message}` };
  }
  const same = found.version === used.version && JSON.stringify(found.blocks) === JSON.stringify(used.blocks);
  return { ...found, note: same ? "" : "The pool has changed since the answer: this is what it would read now." };
}

function showAnswer(answer, selected, seconds) {
  const meta = answer.meta_info, used = meta.sglang_ext, report = attention(meta.attention_report);
  const told = [
    `version ${used.version} of ${used.pool}`,
    `${count(used.blocks.length, "block", "blocks")} with ${count(used.stitched_tokens, "token", "tokens")}`,
    `${number.format(meta.cached_tokens)} of ${count(meta.prompt_tokens, "token", "tokens")} from the cache`,
    used.choice ? `label found in ${count(used.choice.passes, "pass", "passes")}` : null,
    `retrieval ${number.format(used.retrieval_ms)} ms`, `${seconds.toFixed(2)} s in all`,
  ].filter((words) => words !== null);
  const shown = answer.text.trim();
  fill($("result"),
    el("div", { class: "outcome" },
      el("div", {}, el("h3", {}, "Answer"),
        text("p", shown || "(nothing)", { class: `answer${shown.length > 120 ? " long" : ""}`, id: "answer" }),
        el("p", { class: "quiet number" }, told.join(" · ")), report),
      used.label_probs
        ? el("div", {}, el("h3", {}, "Probabilities of the labels"), probabilities(used.label_probs)) : null),
    el("h3", {}, "What it read"),
    selected.note ? el("p", { class: "quiet", role: "status" }, selected.note) : null,
    selected.selection
      ? selection(selected.selection) : el("p", { class: "number" }, `blocks ${used.blocks.join(", ")}`));
}

function probabilities(probs) {
  const sorted = Object.entries(probs).sort((a, b) => b[1] - a[1]);
  const bars = el("div", { class: "bars" });
  const add = (some) => bars.append(...some.flatMap(([label, share]) => [text("span", label),
    el("span", { class: "bar", share, "aria-hidden": "true" }), el("span", { class: "number" }, percent(share))]));
  add(sorted.slice(0, LABELS));
  if (sorted.length <= LABELS) return bars;
  const more = el("button", { type: "button", class: "link", onclick: () => {
    add(sorted.slice(LABELS));
    more.remove();
  } }, `show all ${number.format(sorted.length)} labels`);
  return el("div", {}, bars, more);
}

function selection(entries) {
  const scores = entries.map((entry) => entry.score ?? 0);
  const least = Math.min(0, ...scores), most = Math.max(0, ...scores);
  const share = (score) => (most > least && score !== null ? (score - least) / (most - least) : 0);
  return el("ol", { class: "selection" }, ...entries.map((entry) => el("li", {}, el("details", {}, el("summary", {},
    el("span", {}, el("strong", {}, `block ${entry.block}${entry.sink ? ", sink" : ""}`),
      el("span", { class: "number" }, entry.score === null ? "no score" : `score ${entry.score.toPrecision(4)}`),
      el("span", { class: "bar", share: share(entry.score), "aria-hidden": "true" }),
      el("span", { class: "quiet number" }, count(entry.tokens, "token", "tokens")))),
    demonstrations(entry.demonstrations)))));
}

/** What a report measured of the decoding steps: means over tokens and layers, or why it measured none. */
function attention(report) {
  const told = (report || []).filter((step) => step), steps = told.filter((step) => step.recovered);
  if (!told.length) return null;
  if (!steps.length) return el("p", { class: "quiet" }, `attention: dense, for ${told[told.length - 1].dense}`);
  const mean = (name) => {
    const all = steps.flatMap((step) => step[name]);
    return percent(all.reduce((sum, value) => sum + value, 0) / all.length);
  };
  const over = count(steps.length, "generated token", "generated tokens");
  return el("p", { class: "quiet number" },
    `attention: ${mean("recovered")} recovered, ${mean("exact")} of the tokens read one by one `
    + `(means over ${over} and all layers)`);
}

// ---- the start ----

async function greet() {
  try {
    const info = await call("GET", "server_info", keys.ask);
    document.title = `Pools · ${info.served_model_name}`;
    $("server").textContent = `${info.served_model_name} · ${info.attention_backend} · KV cache of `
      + count(info.max_total_num_tokens, "token", "tokens");
    $("report-label").hidden = !REPORTING.includes(info.attention_backend) || Boolean(info.speculative_algorithm);
  } catch (problem) {
    const words = {
      401: "A question needs the key of this server.",
      403: "This key is a tenant's: the page shows its own pools.",
    };
    $("server").textContent = words[problem.status] ?? problem.message;
  }
}

function useKeys(event) {
  event.preventDefault();
  const [pools, asks] = [$("pools-key").value.trim(), $("ask-key").value.trim()];
  if (!/^[\x21-\x7e]*$/.test(pools + asks)) {
    say("A key holds letters, digits and signs of ASCII, and no spaces.");
    return;
  }
  Object.assign(keys, { pools: pools || asks, ask: asks || pools });
  $("keys").open = false;
  greet();
  refresh();
}

$("key-form").addEventListener("submit", useKeys);
$("ask-form").addEventListener("submit", ask);
$("pool-name").addEventListener("blur", offerLikely);
$("map").addEventListener("keydown", walk);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask-form").requestSubmit();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
greet();
refresh();
