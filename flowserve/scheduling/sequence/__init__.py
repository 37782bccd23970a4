"""The sequence batcher: requests of one sequence run in order, in one instance.

Decides which slot a sequence gets, when it ends, which of its requests form a batch (strategies direct and oldest), and
in which order a rescheduled request of an iterative sequence runs again. Does not know tensors, control inputs or
states (runtime/workers/state.py), and does not start batches. Called by `scheduling.scheduler` only, through
`queue.BoundBatcher`; runtime/workers/policies.py builds it from a configuration. Read batcher.py first.
"""
