"""The live page: deployments and the current figures of each graph, in a browser; and the page of the API.

Decides the pages' URLs, that the assets of each are sent as one document in which no other script may run (`document`),
the limit on viewers, when their events end, and which figures the page shows (`sampler`). `assets/` decides the layout;
`assets/vendor/` has the libraries of others, each unchanged and with its licence. Called by
`http.api.app`, which adds its routes to the others.
"""
