"""Instances in other processes, whatever connects them: worker processes, and actors on other machines.

Decides how such an instance is opened, given batches and ended (`worker`), what the outcome of a batch is that passes
several processes, also if one of them ends (`run`), and what a response of a decoupled model means (`sink`). A `port`
connects the worker to the process: shared memory on this machine (`shm`), TCP to another one (elsewhere/). Does not
know queues or callers. Read `worker` first, then `port`.
"""
