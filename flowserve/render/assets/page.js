const pictures = [...document.querySelectorAll(".picture")];
const bar = document.querySelector(".bar");
function show(open) {
  const wanted = pictures.find(p => p.dataset.open === open) || pictures[0];
  for (const p of pictures) p.hidden = p !== wanted;
}
function toggle(scope, frame) {
  show(frame ? scope.slice(0, Math.max(scope.lastIndexOf("/"), 0)) : scope);
}
for (const g of document.querySelectorAll("[data-scope]")) {
  const frame = g.querySelector("rect").classList.contains("f");
  g.setAttribute("tabindex", "0");
  g.setAttribute("role", "button");
  g.setAttribute("aria-expanded", frame);
  g.addEventListener("click", () => toggle(g.dataset.scope, frame));
  g.addEventListener("keydown", e => {
    if (e.key === "Enter" || e.key === " ") { e.preventDefault(); toggle(g.dataset.scope, frame); }
  });
}
bar.addEventListener("click", e => {
  const open = e.target.dataset.show;
  if (open !== undefined) show(open);
  if (e.target.dataset.fit !== undefined) document.body.classList.toggle("fit");
});
bar.hidden = false;
