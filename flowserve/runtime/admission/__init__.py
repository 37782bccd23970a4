"""Admission control in front of a deployment: response cache, concurrency limit, deadline.

Decides whether a validated request enters the scheduler now, waits, is refused, or is answered from the cache. Does not
know graphs, batches or workers.

Callers: `runtime.engine`, and the simulation in `testing`. Read `controller` first.
"""
