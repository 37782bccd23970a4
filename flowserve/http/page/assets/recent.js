// The last requests to the deployment that is looked at, newest first: when, how long, how they ended, and where the time
// of one of them went. The server records up to ten a second of what is looked at.

const RECENT_MAX = 50;
let recent = []; // {request, line}

function forgetRecent() {
  recent = [];
  $("recent").replaceChildren();
  $("recent-shown").replaceChildren();
  say($("recent-note"), "No request since this page looks at it.");
}

function showRecent(requests) {
  if (!requests.length) return;
  const marked = recent.find((one) => one.line.classList.contains("marked"));
  for (const request of requests) {
    const open = el("button", { type: "button", class: "link", text: new Date(request.at_ms).toLocaleTimeString() });
    const end = request.error ? el("td", { class: "bad", text: request.error, title: request.error }) : el("td", { text: "answered" });
    const line = el("tr", {}, el("td", {}, open), el("td", { text: time(request.ms) }), el("td", { text: String(request.rows) }),
      el("td", { text: request.id }), end);
    const one = { request, line };
    open.addEventListener("click", () => openRecent(one));
    recent.unshift(one);
    $("recent").prepend(line);
  }
  for (const { line } of recent.splice(RECENT_MAX)) line.remove();
  if (marked && !recent.includes(marked)) $("recent-shown").replaceChildren();
  say($("recent-note"), `The last ${recent.length}, up to ten a second.`);
}

function openRecent(one) {
  for (const { line } of recent) line.classList.toggle("marked", line === one.line);
  const entries = timings(one.request.timing);
  const found = lanes(entries);
  const end = Math.max(one.request.ms, ...entries.map((entry) => entry.start + entry.dur)) || 1;
  const heading = el("h3", { text: `${new Date(one.request.at_ms).toLocaleTimeString()}: ${time(one.request.ms)} in the server` });
  const failed = one.request.error ? [el("p", { class: "failed", text: one.request.error })] : [];
  const skipped = entries.filter((entry) => entry.name.endsWith(".skipped"));
  const left = skipped.map((entry) => el("p", { class: "quiet", text: `${entry.name.slice(0, -8)} was skipped: ${entry.desc}` }));
  $("recent-shown").replaceChildren(heading, ...failed, ...[...found].map(([name, phases]) => lane(name, phases, end)),
    ...left, legend(), reasons(found));
  $("recent-shown").scrollIntoView({ block: "nearest" });
}
