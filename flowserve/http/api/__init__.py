"""The KServe v2 API with Triton's extensions: Starlette routes and codecs over an engine.

Decides the URL of each endpoint, how bodies become requests and responses become bodies, the status of each failure,
which web pages may send requests, and which groups of endpoints need a key. `app.make_app` returns an ordinary ASGI
application; `infer.InferRoute` is the inference route, which flowserve's own server calls directly. Does not know
sockets or how models run. Called by the command line and by any ASGI server on trio; `app.py` is the best start for
reading.
"""
