"""HTTP: `server` is the protocol, `api` the endpoints, `page` the live page.

`server` knows neither of the others and could carry any ASGI app; `api` puts an engine behind KServe v2's URLs; `page`
is one of its groups of routes.
"""
