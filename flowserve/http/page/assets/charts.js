// Charts of the deployment that is looked at: the figures of the last minutes, with axes; under the pointer, or with the
// arrow keys, the values of one second.

const CHARTS = [
  ["Requests a second", count, [["answered", "rate", "--accent"], ["failed", "failing", "--bad"]]],
  ["Duration of a request", time, [["p50", "p50", "--accent"], ["p99", "p99", "--wait"]]],
  ["Waiting requests, busy instances", count, [["waiting", "waiting", "--wait"], ["busy", "busy", "--accent"]]],
];
const CHART_HEIGHT = 190;
let history = { at: [], values: {} }; // seconds since 1970, and the values of each figure
let charts = [];

function forgetCharts() {
  history = { at: [], values: {} };
  for (const { plot } of charts) plot.destroy();
  charts = [];
  $("charts").replaceChildren();
}

// `at_ms`: the server's time of these figures, by id. What has no value, such as a duration without requests, is a gap.
function keep(at_ms, figures) {
  if (history.at.length && at_ms / 1000 <= history.at.at(-1)) return;
  history.at.push(at_ms / 1000);
  for (const [id, value] of Object.entries(figures)) (history.values[id] ||= []).push(value ?? null);
  if (history.at.length > HISTORY) for (const list of [history.at, ...Object.values(history.values)]) list.shift();
  showCharts();
}

function showCharts() {
  if (!charts.length) charts = CHARTS.map(makeChart);
  const from = history.at.at(-1) - Number($("range").value);
  const first = history.at.findIndex((at) => at >= from);
  const at = history.at.slice(first);
  for (const { plot, ids } of charts) {
    plot.setData([at, ...ids.map((id) => history.values[id].slice(first))], false);
    plot.setScale("x", { min: from, max: history.at.at(-1) });
  }
}

function makeChart([title, write, lines]) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const holder = el("div", { class: "chart", tabindex: "0", role: "group", "aria-label": `${title}; arrow keys read values` });
  const said = el("p", { class: "hidden", role: "status" });
  $("charts").append(el("figure", {}, el("figcaption", { text: title }), holder, said));
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const plot = new uPlot({
    width: Math.max(holder.clientWidth, 200),
    height: CHART_HEIGHT,
    cursor: { drag: { x: false, y: false }, points: { size: 6 } },
    scales: { x: { time: true, auto: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
    axes: [axis, { ...axis, size: 64, values: (_, values) => values.map((value) => (value ? write(value) : "0")) }],
    series: [
      { label: "time", value: (_, at) => (at ? new Date(at * 1000).toLocaleTimeString() : "–") },
      ...lines.map(([label, , name]) => ({
        label, stroke: colour(name), width: 1.5, points: { show: false },
        value: (_, value) => (value === null || value === undefined ? "–" : write(value)),
      })),
    ],
  }, [[], ...lines.map(() => [])], holder);
  new ResizeObserver(() => plot.setSize({ width: Math.max(holder.clientWidth, 200), height: CHART_HEIGHT })).observe(holder);
  const ids = lines.map(([, id]) => id);
  holder.addEventListener("keydown", (press) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[press.key];
    if (!step || !plot.data[0].length) return;
    press.preventDefault();
    const last = plot.data[0].length - 1;
    const index = Math.min(Math.max((plot.cursor.idx ?? last + 1) + step, 0), last);
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: CHART_HEIGHT / 3 });
    const values = lines.map(([label], i) => `${label} ${plot.series[i + 1].value(plot, plot.data[i + 1][index])}`);
    say(said, `${plot.series[0].value(plot, plot.data[0][index])}: ${values.join(", ")}`);
  });
  return { plot, ids };
}

// Colours are read when a chart is made.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { plot } of charts) plot.destroy();
  charts = [];
  $("charts").replaceChildren();
  if (history.at.length) showCharts();
});
$("range").addEventListener("change", () => history.at.length && showCharts());
