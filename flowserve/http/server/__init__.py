"""HTTP/1.1 over trio: sockets in, requests and responses out.

Decides how bytes become requests and responses: accepting, heads and bodies, framing, keep-alive, limits and deadlines,
TLS, and how a server drains. Calls an ASGI app, or an inference handler (`connection.InferenceHandler`) in front of it.
Does not know Starlette, routes or models; of Starlette it uses only ASGI's type names. Called by the command line and
by tests; `connection.py` is the best start for reading.
"""
