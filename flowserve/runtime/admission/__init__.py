"""Admission control in front of a deployment: response cache, concurrency limit, deadline.

Decides whether a validated request enters the scheduler now, waits, is refused, or is answered from the cache, and
whether a step of an ensemble is answered from the cache (`steps`); `cache` has the entries. Does not know how requests
are scheduled, nor workers.

Callers: `runtime.engine`, and the package `simulation`. Read `controller` first.
"""
