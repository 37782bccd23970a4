// Loading, unloading and access keys; and the start of the page.

async function control(verb) {
  const { name } = selected;
  say($("control-said"), verb === "load" ? "loading" : "unloading: requests under way finish first");
  for (const id of ["load", "unload"]) $(id).disabled = true;
  try {
    await ask(`v2/repository/models/${encodeURIComponent(name)}/${verb}`, { method: "POST" });
    say($("control-said"), verb === "load" ? "loaded" : "unloaded");
    findUnloaded();
  } catch (error) {
    say($("control-said"), error.message);
    if (error.status === 403) askForKey(error.message);
  }
  for (const id of ["load", "unload"]) $(id).disabled = false;
}

function askForKey(why) {
  if ($("keys").open) return;
  if (why) say($("keys-why"), why);
  $("keys-text").value = sessionStorage.getItem("headers") || "";
  $("keys").showModal();
}

$("keys-open").addEventListener("click", () => askForKey(""));
$("keys").addEventListener("close", () => {
  if ($("keys").returnValue !== "save") return;
  sessionStorage.setItem("headers", $("keys-text").value);
  areRefused = false;
  again();
});
$("load").addEventListener("click", () => control("load"));
$("unload").addEventListener("click", () => control("unload"));
$("filter").addEventListener("input", list);
$("try").addEventListener("submit", submit);
window.addEventListener("hashchange", selectFromAddress);
document.addEventListener("visibilitychange", () => document.hidden && again());
setInterval(watch, 500);
makeCharts();
selectFromAddress();
listen();
