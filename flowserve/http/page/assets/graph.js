// The graph of the selected deployment: its picture with figures in it, and tables of the same figures.

const FOLDED_FROM = 30; // from so many steps on, nested ensembles are folded at first
const SMALLER = 0.8;

const view = new View($("picture"), (scale) => say($("scale"), `${Math.round(scale * 100)} %`));
let folded = null; // the paths of the nested ensembles that are drawn as one box; null: by the graph's size
const pathOf = (what) => `${encodeURIComponent(what.name)}/versions/${encodeURIComponent(what.version)}`;

function forgetPicture() {
  folded = null;
  view.isFitting = true;
  $("fold").hidden = $("unfold").hidden = true;
}

// `graph`: the figures of a graph that is not drawn yet.
async function fetchPicture(graph) {
  picture = { digest: graph.picture, graph: null };
  if (folded === null && graph.nodes.length >= FOLDED_FROM) folded = ["*"];
  await drawAgain();
}

async function drawAgain() {
  const wanted = selected;
  const asked = new URLSearchParams((folded || []).map((path) => ["fold", path]));
  if ($("direction").value) asked.set("direction", $("direction").value);
  try {
    const answer = await (await ask(`live/graphs/${pathOf(wanted)}?${asked}`)).json();
    if (selected !== wanted) return;
    const isNew = !picture || !picture.graph || picture.digest !== answer.picture;
    drawGraph(answer);
    if (isNew) describe(answer.graph);
  } catch (error) {
    picture = null;
    trouble(`The picture of ${wanted.name}: ${error.message}`);
  }
}

function drawGraph({ picture: digest, svg, graph }) {
  const drawn = document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true);
  $("picture").replaceChildren(drawn);
  view.show(drawn);
  picture = { ...(picture || {}), digest, graph, nodes: [], labels: [], wires: [], folds: [], spaces: [] };
  const paths = graph.ensembles.map((one) => one.path);
  folded = folded && folded[0] === "*" ? paths : (folded || []).filter((path) => paths.includes(path));
  $("fold").hidden = $("unfold").hidden = !paths.length;
  for (const group of drawn.querySelectorAll("[data-scope]")) foldable(group, graph);
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
    const sources = numbers.map((number) => JSON.stringify(graph.edges[number].from)); // several where a merge is written
    const of = graph.edges.flatMap((edge, i) => (sources.includes(JSON.stringify(edge.from)) ? [i] : []));
    const [type] = label.textContent.split("  "); // the rest reserves space for the figure
    picture.labels.push({ label, of, type });
    label.textContent = type;
  }
  for (const frame of drawn.querySelectorAll("[data-space]")) {
    const text = frame.querySelector("text");
    picture.spaces.push({ number: Number(frame.dataset.space), text, title: text.textContent });
  }
  for (const wire of drawn.querySelectorAll("path[data-edges]")) {
    picture.wires.push({ wire, of: wire.dataset.edges.split(" ").map(Number) });
  }
}

// A nested ensemble: a click on its frame or box, or Enter, folds or unfolds it.
function foldable(group, graph) {
  const path = group.dataset.scope;
  const isOpen = !folded.includes(path);
  const swap = () => {
    folded = isOpen ? [...folded, path] : folded.filter((one) => one !== path);
    drawAgain().then(() => [...$("picture").querySelectorAll("[data-scope]")]
      .find((one) => one.dataset.scope === path)?.focus());
  };
  group.setAttribute("tabindex", "0");
  group.setAttribute("role", "button");
  group.setAttribute("aria-expanded", String(isOpen));
  group.setAttribute("aria-label", `ensemble ${path}`);
  group.addEventListener("click", swap);
  group.addEventListener("keydown", (press) => {
    if (press.key === "Enter" || press.key === " ") { press.preventDefault(); swap(); }
  });
  const of = graph.nodes.flatMap((node, i) => (`${node.ensemble}/`.startsWith(`${path}/`) ? [i] : []));
  if (!isOpen) picture.folds.push({ group, of });
}

// The tables and the form, which stay when the picture is folded or turned.
function describe(graph) {
  $("steps").replaceChildren(...graph.nodes.map((node) => line([node.name, `${node.model}/${node.version}`], 10)));
  const end = (at) => (at.node === null ? "the request" : graph.nodes[at.node].name);
  $("edges").replaceChildren(
    ...graph.edges.map((edge) =>
      line([edge.tensor, kind(edge), end(edge.from), edge.to.node === null ? "the answer" : end(edge.to)], 5)),
  );
  buildForm(graph);
}

function line(texts, more) {
  return el("tr", {}, ...texts.map((text) => el("td", { text })), ...Array.from({ length: more }, () => el("td")));
}

function mark(number) {
  const lines = [...$("steps").children];
  lines.forEach((one, i) => one.classList.toggle("marked", i === number));
  lines[number].scrollIntoView({ block: "center" });
  const node = picture.graph.nodes[number];
  const row = rows.get(modelOf(node));
  const said = [`${node.name} runs ${node.model}/${node.version}`];
  if (node.backend) said[0] += ` on ${node.backend}`;
  if (node.place) said.push(`written at ${node.place}`);
  if (row && row.error) said.push(`the model's last error, at ${new Date(row.error_ms).toLocaleTimeString()}: ${row.error}`);
  sayOrHide($("step-said"), said.join("; "));
}

function showGraph(graph) {
  if (graph.nodes.length !== picture.graph.nodes.length) return;
  graph.nodes.forEach((node, i) => showNode(node, i));
  for (const { group, of } of picture.folds) {
    const inside = of.map((i) => graph.nodes[i]);
    group.classList.toggle("works", inside.some((node) => node.batches > 0));
    group.classList.toggle("waits", inside.some((node) => node.waiting > 0));
    group.classList.toggle("fails", inside.some((node) => node.model.failing > 0));
    group.classList.toggle("down", inside.some((node) => node.away > 0));
  }
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
  for (const { number, text, title } of picture.spaces) say(text, title + shareOf(graph.spaces[number - 1], title));
  graph.edges.forEach((edge, i) => showEdge(graph, edge, i));
}

// Of a space: the share of the rows that its steps run for, or the number of items per request.
function shareOf(space, title) {
  if (!space || space.rows === null) return "";
  return title.startsWith("each") ? `: ${digits(space.rows)} a request` : `: ${digits((space.share || 0) * 100)} % of rows`;
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

// The figures of a waiting tensor are those of its reader, which waits in its model's queue.
function showEdge(graph, edge, i) {
  const cells = $("edges").children[i].children;
  const reader = graph.nodes[picture.graph.edges[i].to.node];
  const values = [edge ? `${bytes(edge.bytes)}/s` : "–", edge ? `${bytes(edge.copied)}/s` : "–",
    reader ? count(reader.waiting) : "–", reader ? time(reader.model.queue_p50) : "–",
    reader ? time(reader.model.queue_p99) : "–"];
  values.forEach((value, at) => say(cells[at + 4], value));
}

$("fit").addEventListener("click", () => view.fit());
$("smaller").addEventListener("click", () => view.zoom(view.scale * SMALLER));
$("larger").addEventListener("click", () => view.zoom(view.scale / SMALLER));
$("scale").addEventListener("click", () => view.zoom(1));
$("direction").addEventListener("change", drawAgain);
$("unfold").addEventListener("click", () => { folded = []; drawAgain(); });
$("fold").addEventListener("click", () => { folded = ["*"]; drawAgain(); });
