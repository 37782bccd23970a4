// The selected deployment: its state and its figures.

const CARDS = [
  ["rate", "Requests", "/s", (row) => row.rate, count],
  ["p50", "Median (p50)", "", (row) => row.p50, time],
  ["p99", "p99", "", (row) => row.p99, time],
  ["failing", "Failures", "/s", (row) => row.failing, count],
  ["waiting", "Queued", "", (row, graph) => perModel(graph, "waiting"), count],
  ["busy", "Busy instances", "", (row, graph) => perModel(graph, "busy"), count],
];
let cards = {};
let picture = null; // the picture that is drawn: its digest, its document, the parts that change

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
  sayOrHide($("step-said"), "");
  $("live").hidden = true;
  forgetHistory();
  forgetPicture();
  forgetRequests();
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

function shown(graph, at_ms) {
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
  if (!picture || picture.digest !== graph.picture) fetchPicture(graph);
  showCards(row, graph, at_ms);
  if (picture && picture.graph) showGraph(graph);
  fetchRequests();
}

// A model that was not loaded gets a version when it is loaded.
function anyVersion() {
  const row = [...rows.values()].find((one) => one.name === selected.name);
  if (row && row.version !== selected.version) select(row);
  return row;
}

function showCards(row, graph, at_ms) {
  const figures = {};
  for (const [id, title, unit, read, write] of CARDS) {
    if (!cards[id]) {
      const value = el("span");
      $("cards").append(el("div", {}, el("dt", { text: title }), el("dd", {}, value, el("small", { text: unit }))));
      cards[id] = { value };
    }
    const value = (figures[id] = read(row, graph) ?? null);
    const total = id === "busy" && value !== null ? ` / ${perModel(graph, "instances")}` : "";
    say(cards[id].value, (value === null ? "–" : write(value)) + total);
  }
  showHistory(at_ms, figures);
}
