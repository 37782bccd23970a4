"""A deployment in simulated time: the server's scheduler and admission control, without its models.

Decides which batches form when, how rows and items are counted without tensors, and the records of both. Does not know
files, or where durations and arrivals come from. Callers: `testing.simulate`, the command `place`. Read deployment.py
first.
"""
