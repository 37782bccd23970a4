// The list of deployments.

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
