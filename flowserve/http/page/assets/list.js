// The list of deployments: graphs first, those with most traffic on top, and below each the models that it runs.

const SORTED_MS = 5000; // the order changes no more often than that, and not while the list is used
let sortedAt = -Infinity;
let under = new Set(); // the keys of models that stand below a graph

const LOOKS = { READY: "good", LOADING: "wait", UNLOADING: "wait", UNAVAILABLE: "bad", "": "" };
const items = new Map();
const stateOf = (row) => (row.state ? row.state.toLowerCase() : "not loaded");

function list() {
  const wanted = $("filter").value.trim().toLowerCase();
  const keys = arranged([...rows.keys()].filter((key) => rows.get(key).name.toLowerCase().includes(wanted)));
  for (const [key, item] of items) if (!rows.has(key)) { item.line.remove(); items.delete(key); }
  for (const key of keys) if (!items.has(key)) items.set(key, makeItem(key));
  if (keys.join() !== order.join()) {
    $("list").replaceChildren(...keys.map((key) => items.get(key).line));
    order = keys;
  }
  for (const key of keys) fill(items.get(key), rows.get(key), key);
  say($("list-note"), keys.length ? "" : rows.size ? "No deployment has this in its name." : "Nothing is served.");
}

function arranged(keys) {
  const isSame = keys.length === order.length && keys.every((key) => items.has(key) && order.includes(key));
  const isUsed = $("list").matches(":hover, :focus-within");
  if (isSame && (isUsed || performance.now() - sortedAt < SORTED_MS)) return order;
  sortedAt = performance.now();
  const byTraffic = (a, b) => {
    const [one, two] = [rows.get(a), rows.get(b)];
    if ((one.rate || 0) !== (two.rate || 0)) return (two.rate || 0) - (one.rate || 0);
    return one.name === two.name ? one.version - two.version : one.name < two.name ? -1 : 1;
  };
  const ofName = new Map();
  for (const key of keys) ofName.set(rows.get(key).name, [...(ofName.get(rows.get(key).name) || []), key]);
  const found = new Set();
  under = new Set();
  for (const graph of keys.filter((key) => rows.get(key).is_ensemble).sort(byTraffic)) {
    found.add(graph);
    for (const key of rows.get(graph).models.flatMap((name) => ofName.get(name) || [])) {
      if (!found.has(key) && !rows.get(key).is_ensemble) { found.add(key); under.add(key); }
    }
  }
  return [...found, ...keys.filter((key) => !found.has(key)).sort(byTraffic)];
}

function makeItem(key) {
  const parts = { dot: el("span"), who: el("span", { class: "who" }), pace: el("span", { class: "pace" }) };
  parts.how = el("span", { class: "how" });
  const button = el("button", { type: "button" }, parts.dot, parts.who, parts.pace, parts.how);
  button.addEventListener("click", () => {
    if (document.body.classList.contains("menu")) { drawer(false); $("main").focus(); }
    select(rows.get(key));
  });
  return { ...parts, button, line: el("li", {}, button) };
}

function fill(parts, row, key) {
  parts.line.classList.toggle("under", under.has(key));
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
  return all.find((row) => row.version) || all[0];
}

// On a narrow screen the list is a drawer.
function drawer(isOpen) {
  document.body.classList.toggle("menu", isOpen);
  $("menu").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $("filter").focus();
}

$("menu").addEventListener("click", () => drawer(!document.body.classList.contains("menu")));
document.addEventListener("keydown", (press) => {
  if (press.key !== "Escape" || !document.body.classList.contains("menu")) return;
  drawer(false);
  $("menu").focus();
});
