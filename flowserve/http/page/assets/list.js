// The list of deployments: graphs first, each with its models beneath it; in each level the one with most traffic first.

const LOOKS = { READY: "good", LOADING: "wait", UNLOADING: "wait", UNAVAILABLE: "bad", "": "" };
const OPEN_MAX = 12; // so many graphs show their models at first
const items = new Map(); // by position: a model is listed beneath each of its graphs
const opened = new Map(); // by key of a graph, where its button was used
let tree = []; // [{key, models}], as it is shown
const stateOf = (row) => (row.state ? row.state.toLowerCase() : "not loaded");
const placeOf = (key, graph = "") => `${graph}\n${key}`;

// The order changes only where traffic does by a factor of two, and not while the list is in use.
const sizes = new Map(); // by key of a deployment: of its rate, as long as that stays within a factor of two
const names = new Intl.Collator("en", { numeric: true }); // step_2 before step_10
const size = (figure) => Math.log2(1 + (figure || 0));
const compare = (a, b) => sizeOf(b) - sizeOf(a) || Math.floor(size(b.total)) - Math.floor(size(a.total)) ||
  names.compare(a.name, b.name) || a.version - b.version;

function sizeOf(row) {
  const key = keyOf(row.name, row.version);
  const before = sizes.get(key);
  const now = size(row.rate);
  if (before === undefined || Math.abs(now - before) >= 1) sizes.set(key, now);
  return Math.floor(sizes.get(key));
}

function sorted(keys) {
  if (tree.length && $("list").matches(":hover, :focus-within")) {
    const before = new Map(tree.flatMap(({ key, models }) => [key, ...models]).map((key, i) => [key, i]));
    if (keys.every((key) => before.has(key))) return [...keys].sort((a, b) => before.get(a) - before.get(b));
  }
  return [...keys].sort((a, b) => compare(rows.get(a), rows.get(b)));
}

function list() {
  const wanted = $("filter").value.trim().toLowerCase();
  const isWanted = (key) => rows.get(key).name.toLowerCase().includes(wanted);
  const graphs = [...rows.keys()].filter((key) => rows.get(key).is_ensemble);
  const models = new Map(graphs.map((key) =>
    [key, (rows.get(key).models || []).map((one) => keyOf(...one)).filter((one) => rows.has(one))]));
  const used = new Set([...models.values()].flat());
  const others = [...rows.keys()].filter((key) => !models.has(key) && !used.has(key));
  const found = [];
  for (const key of [...sorted(graphs), ...sorted(others)]) {
    const own = models.get(key) || [];
    const inside = isWanted(key) ? own : own.filter(isWanted);
    if (isWanted(key) || inside.length) found.push({ key, models: sorted(inside), count: own.length });
  }
  const isOpen = (key) => Boolean(wanted) || (opened.get(key) ?? graphs.length <= OPEN_MAX);
  arrange(found, isOpen);
  for (const { key, models: inside, count: own } of tree) {
    fill(items.get(placeOf(key)), rows.get(key), key, own, isOpen(key));
    for (const model of inside) fill(items.get(placeOf(model, key)), rows.get(model), model, 0, false);
  }
  say($("list-note"), found.length ? "" : rows.size ? "No deployment has this in its name." : "Nothing is served.");
}

function arrange(found, isOpen) {
  const places = new Set(found.flatMap(({ key, models }) => [placeOf(key), ...models.map((one) => placeOf(one, key))]));
  for (const place of items.keys()) if (!places.has(place)) items.delete(place);
  const isSame = JSON.stringify(found) === JSON.stringify(tree) && places.size === items.size;
  tree = found;
  if (isSame) return;
  const focus = document.activeElement;
  for (const { key, models } of found) {
    const item = itemAt(placeOf(key), key);
    item.inside.replaceChildren(...models.map((one) => itemAt(placeOf(one, key), one).line));
  }
  $("list").replaceChildren(...found.map(({ key }) => items.get(placeOf(key)).line));
  if (focus && focus !== document.activeElement && focus.isConnected) focus.focus();
}

function itemAt(place, key) {
  if (!items.has(place)) items.set(place, makeItem(key));
  return items.get(place);
}

function makeItem(key) {
  const parts = { dot: el("span"), who: el("span", { class: "who" }), pace: el("span", { class: "pace" }) };
  parts.how = el("span", { class: "how" });
  parts.inside = el("ul");
  const button = el("button", { type: "button", class: "deployment" }, parts.dot, parts.who, parts.pace, parts.how);
  button.addEventListener("click", () => { select(rows.get(key)); closeDrawer(); });
  const toggle = el("button", { type: "button", class: "toggle" });
  toggle.addEventListener("click", () => { opened.set(key, toggle.getAttribute("aria-expanded") !== "true"); list(); });
  return { ...parts, button, toggle, line: el("li", {}, toggle, button, parts.inside) };
}

function fill(parts, row, key, models, isOpen) {
  parts.dot.className = `dot ${LOOKS[row.state] ?? "bad"}`;
  say(parts.who, row.name);
  say(parts.pace, row.rate ? `${count(row.rate)}/s` : "");
  const what = row.version ? `${row.is_ensemble ? "graph" : "model"}, version ${row.version}, ` : "";
  say(parts.how, what + stateOf(row) + (row.reason || row.error ? " · had errors" : ""));
  const isChosen = selected && key === keyOf(selected.name, selected.version);
  if (isChosen) parts.button.setAttribute("aria-current", "true");
  else parts.button.removeAttribute("aria-current");
  parts.toggle.hidden = !models;
  parts.toggle.setAttribute("aria-expanded", String(isOpen));
  parts.toggle.setAttribute("aria-label", `models of ${row.name}`);
  parts.inside.hidden = !models || !isOpen;
}

// The graph with the most traffic, or the model if there is no graph.
function first() {
  const all = tree.map(({ key }) => rows.get(key));
  return all.find((row) => row.is_ensemble) || all.find((row) => row.version) || all[0];
}

// ----------------------------------------------------------------------------- in a narrow window the list is a drawer

function openDrawer() {
  document.body.classList.add("drawer");
  $("drawer").setAttribute("aria-expanded", "true");
  $("main").inert = true;
  $("filter").focus();
}

function closeDrawer() {
  if (!document.body.classList.contains("drawer")) return;
  document.body.classList.remove("drawer");
  $("drawer").setAttribute("aria-expanded", "false");
  $("main").inert = false;
  $("drawer").focus();
}

$("drawer").addEventListener("click", () => (document.body.classList.contains("drawer") ? closeDrawer() : openDrawer()));
$("shade").addEventListener("click", closeDrawer);
document.addEventListener("keydown", (press) => press.key === "Escape" && closeDrawer());
matchMedia("(max-width:50rem)").addEventListener("change", closeDrawer);
