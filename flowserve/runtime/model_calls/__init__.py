"""BLS: calls of a running model to other models, and its requests to the server.

Decides how a call becomes a request of the engine, what ends it early, and how calls of worker processes arrive. Does
not know how calls are scheduled, nor how a protocol encodes them.

Callers: `runtime.engine` and `runtime.workers`; `http` and `grpc` use `server_requests`. Read `calls` first.
"""
