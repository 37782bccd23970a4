const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();

// The access keys of the live page, which are kept until the tab is closed.
function withKeys(request) {
  for (const line of (sessionStorage.getItem("headers") || "").split("\n")) {
    const colon = line.indexOf(":");
    if (colon > 0) request.headers[line.slice(0, colon).trim()] = line.slice(colon + 1).trim();
  }
  return request;
}

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  docExpansion: "list",
  filter: true,
  requestInterceptor: withKeys,
  tryItOutEnabled: true,
  validatorUrl: null,
});
