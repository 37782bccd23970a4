"""The live page: deployments and the current figures of each graph, in a browser.

Decides the page's URLs, that its assets are sent as one document in which no other script may run, the limit on
viewers, and when their events end. runtime/protocol/sampler.py decides the content, `assets/` the
layout. Called by `http.api.app`, which adds its routes to the others.
"""
