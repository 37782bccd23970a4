// The times of one request: the entries of its Server-Timing header as bars, and above the steps in the picture.

const PHASES = { queue: "waits", input: "gathers inputs", infer: "computes", output: "hands out outputs" };

// name;dur=1.2;desc="words, more words";start=0.3, name;...
function timings(header) {
  const found = [];
  for (const [whole] of header.matchAll(/(?:[^,"]|"(?:\\.|[^"\\])*")+/g)) {
    const [name, ...parameters] = whole.match(/(?:[^;"]|"(?:\\.|[^"\\])*")+/g) || [];
    const entry = { name: decode((name || "").trim()), dur: 0, start: 0, desc: "" };
    for (const one of parameters) {
      const [key, value = ""] = one.split(/=(.*)/s).map((part) => part.trim());
      if (key === "desc") entry.desc = value.replace(/^"|"$/g, "").replace(/\\(.)/g, "$1");
      else if (key === "dur" || key === "start") entry[key] = Number(value) || 0;
    }
    found.push(entry);
  }
  return found;
}

// Lanes in the order in which they begin, each with its phases.
function lanes(entries) {
  const found = new Map();
  for (const entry of entries) {
    const dot = entry.name.lastIndexOf(".");
    const phase = entry.name.slice(dot + 1);
    if (dot < 1 || !PHASES[phase]) continue;
    const name = entry.name.slice(0, dot);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ ...entry, phase });
  }
  return found;
}

// In `place`, and above the boxes of the picture. Nothing for a header without times.
function showTimeline(place, header) {
  const entries = timings(header);
  const total = entries.find((entry) => entry.name === "total");
  const found = lanes(entries);
  if (!total || !found.size) return;
  const end = Math.max(total.dur, ...entries.map((entry) => entry.start + entry.dur)) || 1;
  const words = total.desc ? `, ${total.desc}` : "";
  const heading = el("h3", { text: `Where its time went: ${time(total.dur)} in the server${words}` });
  place.replaceChildren(heading, ...[...found].map(([name, phases]) => lane(name, phases, end)), legend(), reasons(found));
  const left = entries.find((entry) => entry.name === "more");
  if (left) place.append(el("p", { class: "quiet", text: left.desc }));
  place.hidden = false;
  picture.graph.nodes.forEach((node, i) => found.has(node.name) && showTime(i, found.get(node.name)));
}

const sumOf = (phases) => phases.reduce((all, one) => all + one.dur, 0);

function lane(name, phases, end) {
  const bar = draw("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const one of phases) {
    const x = (one.start / end) * 1000;
    const box = draw("rect", { class: one.phase, x, y: 2, width: Math.max((one.dur / end) * 1000, 1.5), height: 12 });
    box.append(draw("title", {}, `${PHASES[one.phase]} ${time(one.dur)}${one.desc ? `: ${one.desc}` : ""}`));
    bar.append(box);
  }
  return el("div", { class: "lane" }, el("span", { class: "label", text: name, title: name }), bar,
    el("span", { class: "took", text: time(sumOf(phases)) }));
}

function reasons(found) {
  const said = (one) => `${PHASES[one.phase]} ${time(one.dur)}${one.desc ? ` (${one.desc})` : ""}`;
  const lines = [...found].map(([name, phases]) => el("li", {}, el("b", { text: name }), `: ${phases.map(said).join(", ")}`));
  return el("details", {}, el("summary", { text: "What each step waited for, and with whom it ran" }), el("ul", {}, ...lines));
}

function legend() {
  return el("div", { class: "legend", "aria-hidden": "true" },
    ...Object.entries(PHASES).map(([phase, text]) => el("span", {}, el("i", { class: phase }), text)));
}

// In the picture: above the step's box, until the next request.
function showTime(index, phases) {
  const parts = picture.nodes[index];
  if (!parts) return;
  const box = parts.group.querySelector("rect");
  const waited = sumOf(phases.filter((one) => one.phase === "queue"));
  const text = `${time(sumOf(phases))}${waited ? `, ${time(waited)} of it waiting` : ""}`;
  parts.group.append(draw("text", { class: "took", x: box.getAttribute("x"), y: Number(box.getAttribute("y")) - 6 }, text));
}

function forgetTimes() {
  for (const text of $("picture").querySelectorAll("text.took")) text.remove();
}
