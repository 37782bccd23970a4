"""Scheduling decisions: which requests run together, on which instance, when.

Decides which steps are ready, which tickets form a batch, which free instance runs it, whether it takes a route, which
parts of a failed batch are retried, when a timeout or a deadline passes, and in which order responses leave. Does not
know tensor contents, protocols, workers, event loops, clocks or threads: times are integer nanoseconds that callers
pass in, and decisions are returned as records (batch.py). Called by `runtime`, whose engine drives the scheduler,
and by simulators (`flowserve.simulation`). Read scheduler.py first.
"""
