// The deployment that is looked at: its state, its figures, and rings of the last HISTORY of them.

const HISTORY = 1000;

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
  ["p50", "Median (p50)", "", (row) => row.p50, time],
  ["p99", "p99", "", (row) => row.p99, time],
  ["failing", "Failures", "/s", (row) => row.failing, count],
  ["waiting", "Queued", "", (row, graph) => perModel(graph, "waiting"), count],
  ["busy", "Busy instances", "", (row, graph) => perModel(graph, "busy"), count],
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
  forgetCharts();
  forgetRecent();
  for (const id of ["picture", "steps", "edges", "inputs", "answer", "timeline"]) $(id).replaceChildren();
  for (const id of ["answer", "timeline"]) $(id).hidden = true;
  for (const id of ["sending", "control-said"]) say($(id), "");
  sayOrHide($("step-said"), "");
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
  const values = {};
  for (const [id, title, unit, read, write] of CARDS) {
    if (!cards[id]) {
      const canvas = el("canvas", { "aria-hidden": "true" });
      const value = el("span");
      $("cards").append(el("div", {}, el("dt", { text: title }), el("dd", {}, value, el("small", { text: unit })), canvas));
      cards[id] = { value, canvas, ring: new Ring() };
    }
    const value = read(row, graph);
    values[id] = value;
    const card = cards[id];
    const total = id === "busy" && value !== null ? ` / ${perModel(graph, "instances")}` : "";
    say(card.value, (value === null || value === undefined ? "–" : write(value)) + total);
    card.ring.push(value || 0);
    spark(card.canvas, card.ring);
  }
  if (link.at) keep(link.at, values);
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
