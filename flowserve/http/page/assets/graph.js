// The graph of the deployment that is looked at: its picture with figures in it, and tables that say the same.

const READABLE = 0.6; // a picture that would be smaller than so much of its size is scrolled instead

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
  picture = { word, graph, nodes: [], labels: [], wires: [], spaces: [], sends: null, zoom: 1 };
  fit($("picture").clientWidth / drawn.viewBox.baseVal.width > READABLE);
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
  for (const frame of drawn.querySelectorAll("[data-space]")) {
    const text = frame.querySelector("text");
    picture.spaces.push({ number: Number(frame.dataset.space), text, title: text.textContent });
  }
  for (const wire of drawn.querySelectorAll("path[data-edges]")) {
    picture.wires.push({ wire, of: wire.dataset.edges.split(" ").map(Number) });
  }
  $("steps").replaceChildren(...graph.nodes.map((node) => line([node.name, `${node.model}/${node.version}`], 10)));
  const end = (at) => (at.node === null ? "the request" : graph.nodes[at.node].name);
  $("edges").replaceChildren(
    ...graph.edges.map((edge) =>
      line([edge.tensor, kind(edge), end(edge.from), edge.to.node === null ? "the answer" : end(edge.to)], 5)),
  );
  buildForm(graph);
}

function fit(isFitting) {
  $("picture").classList.toggle("fit", isFitting);
  $("fit").setAttribute("aria-pressed", String(isFitting));
  zoom(isFitting ? null : 1);
}

// `factor` null: as wide as the page.
function zoom(factor) {
  const drawn = $("picture").querySelector("svg");
  if (!drawn) return;
  const whole = drawn.viewBox.baseVal;
  const shownAs = factor ?? $("picture").clientWidth / whole.width;
  drawn.setAttribute("width", Math.round(whole.width * shownAs));
  drawn.setAttribute("height", Math.round(whole.height * shownAs));
  picture && (picture.zoom = shownAs);
  say($("size"), `${Math.round(shownAs * 100)} %`);
}

// Around a point of the picture that stays where it is, by default its middle.
function zoomBy(step, x = $("picture").clientWidth / 2, y = $("picture").clientHeight / 2) {
  if (!picture || !picture.zoom) return;
  const [box, before] = [$("picture"), picture.zoom];
  box.classList.remove("fit");
  $("fit").setAttribute("aria-pressed", "false");
  zoom(Math.min(Math.max(before * step, 0.1), 4));
  const grown = picture.zoom / before;
  box.scrollLeft = (box.scrollLeft + x) * grown - x;
  box.scrollTop = (box.scrollTop + y) * grown - y;
}

$("smaller").addEventListener("click", () => zoomBy(1 / 1.25));
$("larger").addEventListener("click", () => zoomBy(1.25));
$("picture").addEventListener("keydown", (press) => {
  if (press.key !== "+" && press.key !== "-") return;
  press.preventDefault();
  zoomBy(press.key === "+" ? 1.25 : 1 / 1.25);
});
$("picture").addEventListener("wheel", (turn) => {
  if (!turn.ctrlKey) return;
  turn.preventDefault();
  const at = $("picture").getBoundingClientRect();
  zoomBy(turn.deltaY < 0 ? 1.1 : 1 / 1.1, turn.clientX - at.left, turn.clientY - at.top);
}, { passive: false });
// Dragging the background moves the picture.
$("picture").addEventListener("pointerdown", (press) => {
  if (press.button || press.pointerType === "touch" || press.target.closest("[data-node]")) return;
  const box = $("picture");
  const from = [box.scrollLeft + press.clientX, box.scrollTop + press.clientY];
  const move = (now) => { box.scrollLeft = from[0] - now.clientX; box.scrollTop = from[1] - now.clientY; };
  const end = () => { removeEventListener("pointermove", move); removeEventListener("pointerup", end); };
  addEventListener("pointermove", move);
  addEventListener("pointerup", end);
});

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

// Of the rows that some steps run for: which part of all rows, or how many items of a request.
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

// A tensor that waits is one whose reader stands in its model's queue.
function showEdge(graph, edge, i) {
  const cells = $("edges").children[i].children;
  const reader = graph.nodes[picture.graph.edges[i].to.node];
  const values = [edge ? `${bytes(edge.bytes)}/s` : "–", edge ? `${bytes(edge.copied)}/s` : "–",
    reader ? count(reader.waiting) : "–", reader ? time(reader.model.queue_p50) : "–",
    reader ? time(reader.model.queue_p99) : "–"];
  values.forEach((value, at) => say(cells[at + 4], value));
}
