// What is served and what one graph does now, from the server's events. What is remembered is bounded: one row for each
// deployment there is, and rings of HISTORY numbers for the one that is shown.

const HISTORY = 1000;
const STALE_MS = 3500; // events come once a second
const LOST_MS = 10000;
const RETRY_MS_MAX = 10000;
const READABLE = 0.6; // a picture that would be smaller than so much of its size is scrolled instead

// ------------------------------------------------------------------------------------------------- what the server says

const link = { abort: null, last: 0, state: "", isEnded: false };
const rows = new Map(); // of the list, by key
let order = []; // the keys, as the list has them
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

// For ever: one stream, and another one when that has ended, or something else is looked at.
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
  shown(frame.graph);
}

// In mode explicit the repository holds more than is loaded. That is asked for when the list changes, not all the time.
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

// -------------------------------------------------------------------------------------------------------------- the list

const LOOKS = { READY: "good", LOADING: "wait", UNLOADING: "wait", UNAVAILABLE: "bad", "": "" };
const items = new Map();
const stateOf = (row) => (row.state ? row.state.toLowerCase() : "not loaded");

function list() {
  const wanted = $("filter").value.trim().toLowerCase();
  const keys = [...rows.keys()].filter((key) => rows.get(key).name.toLowerCase().includes(wanted));
  keys.sort((a, b) => {
    const [one, two] = [rows.get(a), rows.get(b)];
    return one.name === two.name ? one.version - two.version : one.name < two.name ? -1 : 1;
  });
  for (const [key, item] of items) if (!rows.has(key)) { item.line.remove(); items.delete(key); }
  for (const key of keys) if (!items.has(key)) items.set(key, makeItem(key));
  if (keys.join() !== order.join()) {
    $("list").replaceChildren(...keys.map((key) => items.get(key).line));
    order = keys;
  }
  for (const key of keys) fill(items.get(key), rows.get(key), key);
  say($("list-note"), keys.length ? "" : rows.size ? "No deployment has this in its name." : "Nothing is served.");
}

function makeItem(key) {
  const parts = { dot: el("span"), who: el("span", { class: "who" }), pace: el("span", { class: "pace" }) };
  parts.how = el("span", { class: "how" });
  const button = el("button", { type: "button" }, parts.dot, parts.who, parts.pace, parts.how);
  button.addEventListener("click", () => select(rows.get(key)));
  return { ...parts, button, line: el("li", {}, button) };
}

function fill(parts, row, key) {
  parts.dot.className = `dot ${LOOKS[row.state] ?? "bad"}`;
  say(parts.who, row.name);
  say(parts.pace, row.rate ? `${count(row.rate)}/s` : "");
  const what = row.version ? `${row.is_ensemble ? "graph" : "model"}, version ${row.version}, ` : "";
  say(parts.how, what + stateOf(row) + (row.reason || row.error ? " · had errors" : ""));
  const isChosen = selected && key === keyOf(selected.name, selected.version);
  if (isChosen) parts.button.setAttribute("aria-current", "true");
  else parts.button.removeAttribute("aria-current");
}

function first() {
  const all = order.map((key) => rows.get(key));
  return all.find((row) => row.is_ensemble) || all.find((row) => row.version) || all[0];
}

// ---------------------------------------------------------------------------------------------------- what is looked at

class Ring {
  constructor() {
    this.values = new Float32Array(HISTORY);
    this.size = 0;
    this.next = 0;
  }
  push(value) {
    this.values[this.next] = value;
    this.next = (this.next + 1) % HISTORY;
    this.size = Math.min(this.size + 1, HISTORY);
  }
  at(number) { // the oldest is 0
    return this.values[(this.next - this.size + number + HISTORY) % HISTORY];
  }
}

const CARDS = [
  ["rate", "Requests", "/s", (row) => row.rate, count],
  ["p50", "Half took at most", "", (row) => row.p50, time],
  ["p99", "99 % took at most", "", (row) => row.p99, time],
  ["failing", "Failures", "/s", (row) => row.failing, count],
  ["waiting", "Queued at its models", "", (row, graph) => perModel(graph, "waiting"), count],
  ["busy", "Instances busy", "", (row, graph) => perModel(graph, "busy"), count],
];
let cards = {};
let picture = null; // what is drawn: its word, the document, the parts that change

// A model that two steps share has one queue.
function perModel(graph, figure) {
  if (!graph || !picture || !picture.graph) return null;
  const models = new Map(graph.nodes.map((node, i) => [modelOf(picture.graph.nodes[i]), node[figure]]));
  return [...models.values()].reduce((sum, value) => sum + value, 0);
}

const modelOf = (node) => (node ? keyOf(node.model, String(node.version)) : "");

function select(row) {
  if (!row) return;
  const target = `#${encodeURIComponent(row.name)}/${encodeURIComponent(row.version)}`;
  if (location.hash !== target) location.hash = target;
  else selectFromAddress();
}

function selectFromAddress() {
  const [name, version] = location.hash.slice(1).split("/").map(decode);
  if (!name || (selected && selected.name === name && selected.version === (version || ""))) return;
  selected = { name, version: version || "" };
  picture = null;
  cards = {};
  $("cards").replaceChildren();
  for (const id of ["picture", "steps", "edges", "inputs", "answer", "timeline"]) $(id).replaceChildren();
  for (const id of ["answer", "timeline"]) $(id).hidden = true;
  for (const id of ["sending", "control-said"]) say($(id), "");
  $("live").hidden = true;
  shown(null);
  list();
  again();
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function shown(graph) {
  if (!selected) return;
  const row = rows.get(keyOf(selected.name, selected.version)) || anyVersion();
  $("nothing").hidden = Boolean(row);
  $("shown").hidden = !row;
  if (!row) return say($("nothing"), rows.size ? `There is no deployment ${selected.name} now.` : "Waiting for the server.");
  document.title = `${row.name} · flowserve`;
  say($("title"), row.name);
  say($("state"), stateOf(row));
  $("state").className = `pill ${LOOKS[row.state] ?? "bad"}`;
  say($("what"), row.version ? `${row.is_ensemble ? "graph" : "model"}, version ${row.version}` : "");
  sayOrHide($("reason"), row.reason);
  $("control").hidden = !canLoad;
  say($("load"), row.version ? "Load again" : "Load");
  $("unload").hidden = !row.version;
  const when = row.error_ms ? new Date(row.error_ms).toLocaleTimeString() : "";
  sayOrHide($("error"), row.error ? `Last error, at ${when}: ${row.error}` : "");
  const isHere = graph && graph.name === selected.name && graph.version === selected.version;
  if (!isHere) return;
  $("live").hidden = false;
  if (!picture || picture.word !== graph.picture) fetchPicture(graph.picture);
  showCards(row, graph);
  if (picture && picture.graph) showGraph(graph);
}

// What was not loaded has a version as soon as it is.
function anyVersion() {
  const row = [...rows.values()].find((one) => one.name === selected.name);
  if (row && row.version !== selected.version) select(row);
  return row;
}

function showCards(row, graph) {
  for (const [id, title, unit, read, write] of CARDS) {
    if (!cards[id]) {
      const canvas = el("canvas", { "aria-hidden": "true" });
      const value = el("span");
      $("cards").append(el("div", {}, el("dt", { text: title }), el("dd", {}, value, el("small", { text: unit })), canvas));
      cards[id] = { value, canvas, ring: new Ring() };
    }
    const value = read(row, graph);
    const card = cards[id];
    const total = id === "busy" && value !== null ? ` / ${perModel(graph, "instances")}` : "";
    say(card.value, (value === null || value === undefined ? "–" : write(value)) + total);
    card.ring.push(value || 0);
    spark(card.canvas, card.ring);
  }
}

function spark(canvas, ring) {
  const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  if (!width) return;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  let most = 1e-9;
  for (let i = 0; i < ring.size; i++) most = Math.max(most, ring.at(i));
  const span = Math.max(ring.size - 1, 60); // a minute is as wide as the card until there is more
  const x = (i) => width - ((ring.size - 1 - i) / span) * width;
  const y = (i) => height - 2 - (ring.at(i) / most) * (height - 5);
  pen.beginPath();
  for (let i = 0; i < ring.size; i++) pen.lineTo(x(i), y(i));
  pen.strokeStyle = getComputedStyle(canvas).color;
  pen.lineWidth = 1.5;
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(x(0), height);
  pen.globalAlpha = 0.12;
  pen.fillStyle = pen.strokeStyle;
  pen.fill();
}

// ------------------------------------------------------------------------------------------------------------ the graph

const pathOf = (what) => `${encodeURIComponent(what.name)}/versions/${encodeURIComponent(what.version)}`;

async function fetchPicture(word) {
  const wanted = selected;
  picture = { word, graph: null };
  try {
    const answer = await (await ask(`live/graphs/${pathOf(wanted)}`)).json();
    if (selected !== wanted) return;
    build(answer);
  } catch (error) {
    picture = null;
    trouble(`The picture of ${wanted.name}: ${error.message}`);
  }
}

function build({ picture: word, svg, graph }) {
  const drawn = document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true);
  $("picture").replaceChildren(drawn);
  fit($("picture").clientWidth / drawn.viewBox.baseVal.width > READABLE);
  picture = { word, graph, nodes: [], labels: [], wires: [], sends: null };
  for (const group of drawn.querySelectorAll("[data-node]")) {
    const number = Number(group.dataset.node);
    const lines = [...group.querySelectorAll("text")].slice(-3);
    for (const line of lines) { line.setAttribute("class", "s live"); line.textContent = ""; }
    group.setAttribute("tabindex", "0");
    group.setAttribute("role", "button");
    group.setAttribute("aria-label", `step ${graph.nodes[number].name}: show its figures`);
    group.addEventListener("click", () => mark(number));
    group.addEventListener("keydown", (press) => {
      if (press.key === "Enter" || press.key === " ") { press.preventDefault(); mark(number); }
    });
    picture.nodes[number] = { group, lines };
  }
  for (const label of drawn.querySelectorAll("text[data-edges]")) {
    const numbers = label.dataset.edges.split(" ").map(Number);
    const source = JSON.stringify(graph.edges[numbers[0]].from);
    const of = graph.edges.flatMap((edge, i) => (JSON.stringify(edge.from) === source ? [i] : []));
    const type = label.previousSibling.textContent ? kind(graph.edges[numbers[0]]) : "";
    picture.labels.push({ label, of, type });
    label.textContent = type;
  }
  for (const wire of drawn.querySelectorAll("path[data-edges]")) {
    picture.wires.push({ wire, of: wire.dataset.edges.split(" ").map(Number) });
  }
  $("steps").replaceChildren(...graph.nodes.map((node) => line([node.name, `${node.model}/${node.version}`], 10)));
  const end = (at) => (at.node === null ? "the request" : graph.nodes[at.node].name);
  $("edges").replaceChildren(
    ...graph.edges.map((edge) =>
      line([edge.tensor, kind(edge), end(edge.from), edge.to.node === null ? "the answer" : end(edge.to)], 4)),
  );
  buildForm(graph);
}

function fit(isFitting) {
  $("picture").classList.toggle("fit", isFitting);
  $("fit").setAttribute("aria-pressed", String(isFitting));
}

function line(texts, more) {
  return el("tr", {}, ...texts.map((text) => el("td", { text })), ...Array.from({ length: more }, () => el("td")));
}

function mark(number) {
  const lines = [...$("steps").children];
  lines.forEach((one, i) => one.classList.toggle("marked", i === number));
  lines[number].scrollIntoView({ block: "center" });
}

function showGraph(graph) {
  if (graph.nodes.length !== picture.graph.nodes.length) return;
  graph.nodes.forEach((node, i) => showNode(node, i));
  const sum = (of, figure) => of.reduce((all, i) => all + (graph.edges[i] ? graph.edges[i][figure] : 0), 0);
  for (const { label, of, type } of picture.labels) {
    const moved = sum(of, "bytes");
    say(label, moved ? `${type}  ${bytes(moved)}/s` : type);
  }
  for (const { wire, of } of picture.wires) {
    const readers = of.map((i) => picture.graph.edges[i].to.node);
    const flows = readers.some((node, i) =>
      node === null ? producerWorks(graph, picture.graph.edges[of[i]]) : graph.nodes[node].batches > 0);
    wire.classList.toggle("flows", flows);
    wire.classList.toggle("copies", sum(of, "copied") > 0);
  }
  graph.edges.forEach((edge, i) => showEdge(graph, edge, i));
}

const producerWorks = (graph, edge) => edge.from.node !== null && graph.nodes[edge.from.node].batches > 0;

function showNode(node, i) {
  const { model } = node;
  const parts = picture.nodes[i];
  const row = rows.get(modelOf(picture.graph.nodes[i]));
  const busy = `${node.busy}/${node.instances}${node.away ? `, ${node.away} down` : ""}`;
  if (parts) {
    parts.group.classList.toggle("works", node.batches > 0);
    parts.group.classList.toggle("waits", node.waiting > 0);
    parts.group.classList.toggle("fails", model.failing > 0);
    parts.group.classList.toggle("down", node.away > 0);
    const isIdle = !node.batches && !node.in_flight;
    say(parts.lines[0], isIdle ? "idle" : `${count(node.batches)}/s, batches of ${digits(node.mean_batch || 0)}`);
    say(parts.lines[1], `queue ${count(node.waiting)}, busy ${busy}`);
    say(parts.lines[2], model.p50 === null ? "" : `p50 ${time(model.p50)}, p99 ${time(model.p99)}`);
  }
  const mean = node.mean_batch === null ? "–" : digits(node.mean_batch);
  const values = [count(node.batches), mean, count(node.in_flight), count(node.waiting), busy, time(model.queue_p50),
    time(model.queue_p99), time(model.compute_p50), time(model.compute_p99), count(model.failing)];
  const cells = $("steps").children[i].children;
  values.forEach((value, at) => say(cells[at + 2], value));
  cells[1].title = row && row.error ? `last error: ${row.error}` : "";
}

// A tensor that waits is one whose reader stands in its model's queue.
function showEdge(graph, edge, i) {
  const cells = $("edges").children[i].children;
  const reader = graph.nodes[picture.graph.edges[i].to.node];
  const values = [edge ? `${bytes(edge.bytes)}/s` : "–", edge ? `${bytes(edge.copied)}/s` : "–",
    reader ? count(reader.waiting) : "–", reader ? time(reader.model.queue_p99) : "–"];
  values.forEach((value, at) => say(cells[at + 4], value));
}
