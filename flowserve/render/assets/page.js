const FOLDED_FROM = 30; // a graph of so many steps is shown with its nested ensembles folded at first

const pictures = [...document.querySelectorAll(".picture > svg")];
const frame = document.querySelector(".picture");
const bar = document.querySelector(".bar");
const scale = bar.querySelector("[data-scale]");
const view = new View(frame, (now) => { scale.textContent = `${Math.round(now * 100)} %`; });

function show(open) {
  const wanted = pictures.find((svg) => svg.dataset.open === open) || pictures[0];
  for (const svg of pictures) svg.toggleAttribute("hidden", svg !== wanted);
  view.show(wanted);
}

function toggle(scope, isFrame) {
  show(isFrame ? scope.slice(0, Math.max(scope.lastIndexOf("/"), 0)) : scope);
}

for (const group of document.querySelectorAll("[data-scope]")) {
  const isFrame = group.querySelector("rect").classList.contains("f");
  group.setAttribute("tabindex", "0");
  group.setAttribute("role", "button");
  group.setAttribute("aria-expanded", isFrame);
  group.addEventListener("click", () => toggle(group.dataset.scope, isFrame));
  group.addEventListener("keydown", (press) => {
    if (press.key === "Enter" || press.key === " ") { press.preventDefault(); toggle(group.dataset.scope, isFrame); }
  });
}
bar.addEventListener("click", (click) => {
  const { show: open, zoom } = click.target.dataset;
  if (open !== undefined) show(open);
  if (zoom === "fit") view.fit();
  else if (zoom) view.zoom(zoom === "1" ? 1 : view.scale * Number(zoom));
});
bar.hidden = false;
const isLarge = document.querySelectorAll("tbody tr").length >= FOLDED_FROM;
show(document.body.dataset.fold !== undefined || isLarge ? "" : "*");
