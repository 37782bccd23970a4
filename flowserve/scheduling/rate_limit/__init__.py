"""The rate limiter: resources that instances need while they run, and the order of the queues that wait for them.

Decides whether an instance's resources are free, which waiting queue is next, and for which queue resources are
reserved. Does not know how batches are formed or run, and reads no clock. Called by `scheduling.scheduler`; `runtime`
builds the limiter and checks the needs of new instances. Read limiter.py first.
"""
