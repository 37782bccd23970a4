"""Tensor storage: host, pinned and device memory, and the only copies of tensors.

Decides: how a tensor is represented (rows of a block, `tensor`; on a GPU, `device_tensor`); when a batch is passed on
without a copy and when it is copied (`assemble`, `column`; on a GPU, `stream`); when memory is reused (`pool`,
`device_memory`, `arena`) and when it returns to the system (`release`, `heap`); how memory is shared with worker
processes (`segment`) and with clients (`client_memory`); how tensors are encoded for the protocols (`raw`) and
exchanged with other libraries (`dlpack`).

Does not know: requests, deployments, models, queues, protocols. It runs no model and takes no scheduling decision.

Callers: `backends`, `observe`, `runtime`, `http` and `grpc`. It imports `config` and `graph` only for the numbers of
GPUs and for shape conversions along an edge.
"""
