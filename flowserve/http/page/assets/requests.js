// The last requests of the selected deployment, newest first, each with its timeline. They are asked for once a second,
// which makes the server record them. While a timeline is open, newer requests wait, so that it stays in sight.

const REQUESTS_MAX = 50;
let lastRequests = new Map(); // by number: the lines of the table
let newest = 0;
let held = []; // newer requests that are not shown yet
let areRefused = false; // until another key is entered
let isAsking = false;

function forgetRequests() {
  lastRequests = new Map();
  newest = 0;
  held = [];
  $("requests").replaceChildren();
  say($("requests-note"), "");
}

async function fetchRequests() {
  if (isAsking || areRefused || !selected.version || document.hidden) return;
  const wanted = selected;
  isAsking = true;
  try {
    const { requests } = await (await ask(`live/requests/${pathOf(wanted)}?after=${newest}`)).json();
    if (selected !== wanted) return;
    for (const one of requests) newest = Math.max(newest, one.number);
    held = [...held, ...requests].slice(-REQUESTS_MAX);
    showRequests();
  } catch (error) {
    areRefused = error.status === 403;
    say($("requests-note"), `The last requests: ${error.message}`);
  } finally {
    isAsking = false;
  }
}

function showRequests() {
  const isOpen = $("requests").querySelector("[aria-expanded=true]");
  if (!isOpen) held.splice(0).forEach(addRequest);
  const waiting = held.length < REQUESTS_MAX ? held.length : `${REQUESTS_MAX} or more`;
  const note = lastRequests.size ? "" : "No request has ended since this page looks.";
  say($("requests-note"), held.length ? `${waiting} newer, shown when the timeline is closed.` : note);
}

function addRequest(request) {
  const result = request.error || (request.timing.match(/^total;[^,]*desc="([^"]*)"/) || [, "ok"])[1];
  const when = new Date(request.at_ms);
  const time_of_day = `${when.toLocaleTimeString([], { hour12: false })}.${String(when.getMilliseconds()).padStart(3, "0")}`;
  const open = el("button", { type: "button", class: "toggle", "aria-expanded": "false",
    "aria-label": `timeline of the request of ${time_of_day}`, disabled: !request.timing });
  const line = el("tr", { class: request.error ? "is-failed" : "" },
    el("td", {}, open, time_of_day),
    el("td", { text: request.ms === null ? "–" : time(request.ms) }),
    el("td", { text: request.rows === null ? "–" : String(request.rows) }),
    el("td", { class: "id", text: request.id || "–", title: request.id }),
    el("td", { class: "result", text: result }));
  const more = el("tr", { class: "more", hidden: true }, el("td", { colspan: "5" }));
  open.addEventListener("click", () => {
    const isOpen = open.getAttribute("aria-expanded") === "true";
    open.setAttribute("aria-expanded", String(!isOpen));
    more.hidden = isOpen;
    forgetTimes();
    if (!isOpen) showTimeline(more.firstChild, request.timing);
    else showRequests();
  });
  lastRequests.set(request.number, [line, more]);
  $("requests").prepend(line, more);
  if (lastRequests.size > REQUESTS_MAX) {
    const [oldest] = lastRequests.keys();
    lastRequests.get(oldest).forEach((one) => one.remove());
    lastRequests.delete(oldest);
  }
}

$("failures-only").addEventListener("change", () => $("requests").classList.toggle("only", $("failures-only").checked));
