
"use strict";
// All that the server sends is text of other people: it becomes text nodes, and never HTML. Keys stay in `keys`.

const TILES = 600, DEMONSTRATIONS = 30, LABELS = 6, CHARACTERS = 800; // shown before somebody asks for more
const SOON = 1500, LATER = 10000; // milliseconds between two looks at the pools, while one is encoded and else
const REPORTING = ["double_p", "dbsa+double_p", "quest", "retroinfer", "twilight"]; // systems with attention_report

const keys = { pools: "", ask: "" };
const state = {
  pools: null, // as GET /v1/pools tells them; null where it does not
  closed: false, // they need another key
  name: null, detail: null, // of the pool that is shown
  open: null, at: 0, allTiles: false, // of its blocks: the one that is shown, the one that the Tab key leads to
  used: null, // what the last answer used
  timer: 0,
};
const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const count = (value, one, many) => `${number.format(value)} ${value === 1 ? one : many}`;
const percent = (value) => `${(100 * value).toFixed(1)}%`;

// ---- elements ----

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (name === "share") made.style.setProperty("--share", percent(Math.max(0, Math.min(1, value))));
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  const kept = children.filter((child) => child !== null);
  made.append(...kept.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

/**
 * Puts children into a parent. What looks as before stays the same element, so that no click falls between two looks at
 * the pools; what had the focus has it again, and what was open stays open.
 */
function fill(parent, ...children) {
  const wanted = el("div", {}, ...children), old = [...parent.childNodes];
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  for (const each of parent.querySelectorAll("details[open][data-key]")) {
    const same = wanted.querySelector(`[data-key="${CSS.escape(each.dataset.key)}"]`);
    if (same) same.open = true;
  }
  const fresh = [...wanted.childNodes];
  if (fresh.length !== old.length) parent.replaceChildren(...fresh);
  else fresh.forEach((each, place) => old[place].isEqualNode(each) || old[place].replaceWith(each));
  if (focused === undefined || parent.contains(document.activeElement)) return;
  parent.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** A text of any length: a long one is cut until somebody asks for the rest. */
function text(tag, value, attributes = {}) {
  const shown = el(tag, { dir: "auto", ...attributes }, value.slice(0, CHARACTERS));
  if (value.length > CHARACTERS) {
    const rest = el("button", { type: "button", class: "link", onclick: () => shown.replaceChildren(value) },
      `show all ${number.format(value.length)} characters`);
    shown.append("… ", rest);
  }
  return shown;
}

function error(message) {
  return el("p", { class: "error", role: "alert" }, message);
}

function say(message) {
  if ($("notice").textContent === message) return; // it would be read out again
  $("notice").hidden = !message;
  $("notice").textContent = message;
}

// ---- the server ----

class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function call(method, path, key, body) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer, data = null;
  try {
    // Paths are relative: a proxy may serve all of this below a folder.
    const sends = { method, headers, body: body && JSON.stringify(body) };
    answer = await fetch(path, { ...sends, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch {
    throw new Problem("The server does not answer. Is it still running?", 0);
  }
  const sent = await answer.text();
  try {
    data = JSON.parse(sent);
  } catch { /* what is no JSON is shown as it is */ }
  if (answer.ok) return data;
  const found = data && (data.error?.message ?? data.error ?? data.message ?? data.detail);
  const words = typeof found === "string" ? found : sent.slice(0, CHARACTERS) || answer.statusText;
  throw new Problem(`${words} (${answer.status})`, answer.status);
}

const poolPath = (name, ...rest) => ["v1/pools", encodeURIComponent(name), ...rest].join("/");
