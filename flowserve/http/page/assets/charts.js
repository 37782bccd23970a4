// The figures of the selected deployment, once a second, in ring buffers of HISTORY values; and charts of them.

const HISTORY = 1000;
const CHARTS = [
  ["Requests", "/s", [["rate", "requests", "--accent"], ["failing", "failures", "--bad"]], count],
  ["Latency", "ms", [["p50", "p50", "--good"], ["p99", "p99", "--wait"]], time],
  ["Load", "", [["waiting", "queued", "--wait"], ["busy", "busy instances", "--accent"]], count],
];
const CHART_HEIGHT = 150;

class Ring {
  constructor() {
    this.values = new Float64Array(HISTORY);
    this.size = 0;
    this.next = 0;
  }
  push(value) { // null: no figure
    this.values[this.next] = value ?? NaN;
    this.next = (this.next + 1) % HISTORY;
    this.size = Math.min(this.size + 1, HISTORY);
  }
  last(number) {
    const found = [];
    for (let i = this.size - Math.min(number, this.size); i < this.size; i++) {
      const value = this.values[(this.next - this.size + i + HISTORY) % HISTORY];
      found.push(Number.isNaN(value) ? null : value);
    }
    return found;
  }
}

const clockTime = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
let rings = null; // {at, rate, ...} of the selected deployment
let range = 60; // seconds
const charts = [];
const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function forgetHistory() {
  rings = Object.fromEntries(["at", ...CARDS.map(([id]) => id)].map((id) => [id, new Ring()]));
}

function makeCharts() {
  for (const [title, unit, series, write] of CHARTS) {
    const place = el("div", { class: "chart", role: "group", tabindex: "0",
      "aria-label": `${title} over time; the arrow keys move through the values` });
    $("charts").append(place);
    const line = { stroke: () => shade("--quiet"), grid: { stroke: () => shade("--line"), width: 1 },
      ticks: { stroke: () => shade("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
    const options = {
      title: unit ? `${title}, ${unit}` : title,
      width: 300,
      height: CHART_HEIGHT,
      cursor: { sync: { key: "live" }, drag: { x: false, y: false } },
      scales: {
        x: { range: (chart, low, high) => [high - range, high] },
        y: { range: (chart, low, high) => [0, high > 0 ? high * 1.1 : 1] },
      },
      axes: [{ ...line, space: 76, values: (chart, all) => all.map(clockTime) }, { ...line, size: 64, values: (chart, all) => all.map((value) => write(value)) }],
      series: [
        { label: "at", value: (chart, at) => (at === null ? "–" : clockTime(at)) },
        ...series.map(([, label, color]) => ({ label, stroke: () => shade(color), width: 1.5, points: { show: false },
          value: (chart, value) => (value === null || value === undefined ? "–" : `${value}${unit && ` ${unit}`}`) })),
      ],
      hooks: { setCursor: [showLatest] },
    };
    const chart = new uPlot(options, [[], ...series.map(() => [])], place);
    place.addEventListener("keydown", (press) => step(chart, press));
    charts.push({ chart, place, ids: series.map(([id]) => id) });
  }
  new ResizeObserver(() => {
    for (const { chart, place } of charts) {
      if (place.clientWidth) chart.setSize({ width: place.clientWidth - 2, height: CHART_HEIGHT });
    }
  }).observe($("charts"));
  matchMedia("(prefers-color-scheme:dark)").addEventListener("change", () =>
    charts.forEach(({ chart }) => chart.redraw(false)));
}

// Without a pointer in the chart, its legend has the latest values.
function showLatest(chart) {
  if (chart.cursor.idx === null || chart.cursor.idx === undefined || chart.cursor.left < 0) {
    const idx = chart.data[0].length - 1;
    if (idx >= 0) chart.setLegend({ idx }, false);
  }
}

function step(chart, press) {
  const last = chart.data[0].length - 1;
  const now = chart.cursor.left >= 0 ? chart.cursor.idx ?? last : last;
  const wanted = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[press.key];
  if (press.key === "Escape") chart.setCursor({ left: -10, top: -10 }, true, true);
  if (wanted === undefined || last < 0) return;
  press.preventDefault();
  const idx = Math.min(Math.max(wanted, 0), last);
  chart.setCursor({ left: chart.valToPos(chart.data[0][idx], "x"), top: 10 }, true, true);
}

function showHistory(at_ms, figures) {
  rings.at.push(at_ms / 1000);
  for (const [id, value] of Object.entries(figures)) rings[id].push(value);
  drawCharts();
}

function drawCharts() {
  if (!rings) return;
  const at = rings.at.last(range + 1);
  for (const { chart, ids } of charts) {
    chart.setData([at, ...ids.map((id) => rings[id].last(range + 1))]);
    showLatest(chart);
  }
}

$("ranges").addEventListener("click", (click) => {
  if (!click.target.dataset.range) return;
  range = Number(click.target.dataset.range);
  for (const button of $("ranges").children) button.setAttribute("aria-pressed", String(button === click.target));
  drawCharts();
});
