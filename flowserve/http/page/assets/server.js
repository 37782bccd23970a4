// The server's events: one stream at a time, which is opened again when it is lost. Memory is bounded: one row for each
// deployment.

const STALE_MS = 3500; // events come once a second
const LOST_MS = 10000;
const RETRY_MS_MAX = 10000;

const link = { abort: null, last: 0, state: "", isEnded: false };
const rows = new Map(); // of the list, by key
let selected = null; // {name, version}
let canLoad = false;

const keyOf = (name, version) => JSON.stringify([name, version]);

function headers(more = {}) {
  const all = new Headers(more);
  for (const line of (sessionStorage.getItem("headers") || "").split("\n")) {
    const colon = line.indexOf(":");
    if (colon < 1) continue;
    try {
      all.set(line.slice(0, colon).trim(), line.slice(colon + 1).trim());
    } catch {
      trouble(`This is no header: ${line}`);
    }
  }
  return all;
}

async function ask(path, options = {}) {
  const response = await fetch(path, { cache: "no-store", ...options, headers: headers(options.headers) });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text();
  let error = text;
  try {
    error = JSON.parse(text).error ?? text;
  } catch { /* not ours: a proxy's, and said as it is */ }
  const made = new Error(error || `${response.status} ${response.statusText}`);
  made.status = response.status;
  made.timing = response.headers.get("server-timing");
  return made;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function seen() {
  while (document.hidden) {
    connection("wait", "paused");
    await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
  }
}

// Runs for ever: opens another stream when one has ended or another deployment was selected.
async function listen() {
  let wait = 500;
  for (;;) {
    await seen();
    const abort = (link.abort = new AbortController());
    link.isEnded = false;
    link.last = performance.now();
    try {
      const watched = selected && selected.version ? `?${new URLSearchParams(selected)}` : "";
      const response = await ask(`live/events${watched}`, { signal: abort.signal });
      for await (const frame of events(response.body)) {
        link.last = performance.now();
        if (frame.end) throw new Error("the server is stopping");
        wait = 500;
        connection("good", "live");
        show(frame);
      }
      throw new Error("the server closed the connection");
    } catch (error) {
      if (abort.signal.reason === "again") continue;
      const text = abort.signal.aborted ? "the server says nothing" : error.message;
      link.isEnded = true;
      connection("bad", "lost, connecting again");
      sayOrHide($("trouble"), `No live figures: ${text}. What stands here is old.`);
      if (error.status === 403) askForKey(error.message);
      await pause(wait);
      wait = Math.min(wait * 2, RETRY_MS_MAX);
    }
  }
}

const again = () => link.abort && link.abort.abort("again");

function watch() {
  if (link.isEnded || document.hidden || !link.abort) return;
  const quiet = performance.now() - link.last;
  if (quiet > LOST_MS) link.abort.abort("stale");
  else if (quiet > STALE_MS) connection("wait", `stale for ${Math.round(quiet / 1000)} s`);
}

function connection(look, text) {
  document.body.dataset.link = look;
  $("link").className = `pill ${look}`;
  say($("link"), text);
  if (look === "good") sayOrHide($("trouble"), "");
}

const trouble = (text) => sayOrHide($("trouble"), text);

function show(frame) {
  canLoad = frame.can_load;
  sayOrHide($("ready"), frame.server.is_ready ? "ready" : "not ready");
  $("ready").className = `pill ${frame.server.is_ready ? "good" : "wait"}`;
  say($("flight"), `${count(frame.server.in_flight)} in flight`);
  if (frame.names) {
    const there = new Set(frame.names.map(([name, version]) => keyOf(name, version)));
    for (const [key, row] of rows) if (!there.has(key) && row.state) rows.delete(key);
    if (canLoad) findUnloaded();
  }
  for (const row of frame.deployments) rows.set(keyOf(row.name, row.version), row);
  list();
  if (!selected) select(first());
  shown(frame.graph, frame.at_ms);
}

// In mode explicit the repository also has models that are not loaded. They are fetched only when the list changes.
async function findUnloaded() {
  try {
    const index = await (await ask("v2/repository/index", { method: "POST" })).json();
    const loaded = new Set([...rows.values()].filter((row) => row.state).map((row) => row.name));
    for (const [key, row] of rows) if (!row.state) rows.delete(key);
    for (const row of index) {
      if (!row.state && !loaded.has(row.name)) {
        rows.set(keyOf(row.name, ""), { name: row.name, version: "", state: "", reason: "" });
      }
    }
    list();
  } catch (error) {
    trouble(`The repository's index: ${error.message}`);
  }
}
