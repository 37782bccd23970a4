"""Models that another KServe v2 server runs: `execution: "remote"` with the `url` of its gRPC port.

`backend` describes such models and makes their instances, each of which sends whole batches; `messages` packs a batch
into a request and reads the response. Only the backends' registry names this package.
"""
