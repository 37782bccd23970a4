"""The gRPC front end: KServe's `inference.GRPCInferenceService` with Triton's additions, and gRPC's health service.

Decides: the conversion between protobuf messages and `Request`/`Response`, the gRPC status of each kind of failure, the
order of responses in a stream, ports, keepalive and TLS of grpcio's server, and that grpcio's asyncio loop runs as a
guest of the engine's trio loop, so that a request changes threads nowhere (docs/decisions/0021).

Does not know how requests are validated, scheduled or run (`runtime`), or HTTP. Code shared with `http` is in
`runtime/protocol.py`. grpcio is imported in this package only, and not by `options`, which the command line imports.

Caller: `cli`. Entry points: `options.GrpcOptions`, `server.GrpcServer`.
"""
