"""Tracing: which requests are traced, what is recorded of them, and where the records go.

Decides when the engine is observed; changes no scheduling decision. Does not know trace formats and files (`observe/`),
nor protocols.

Callers: `runtime.engine`; `http` and `grpc` through `engine.traces`. Read `traces` first, then `tracing`.
"""
