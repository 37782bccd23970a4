"""Decoupled models: steps that send any number of responses.

Decides which steps of an iteration are ready, how many responses a decoupled step may send (credits), which send()
waits, when such a wait is a deadlock, and in which order the responses of a request leave. Does not know how responses
travel between workers and callers, and reads no clock. Called by `scheduling.scheduler`, and by the response sinks in
`runtime.workers` through `Scheduler.streams`. Read frames/stream.py first.
"""
