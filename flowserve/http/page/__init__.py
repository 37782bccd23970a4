"""The live page: deployments and the current figures of each graph, in a browser.

Decides the page's URLs, that its assets are sent as one document in which no other script may run, the limit on
viewers, when their events end, and which figures the page shows (`sampler`). `assets/` decides the layout. Called by
`http.api.app`, which adds its routes to the others.
"""
