"""Code that the front ends `http` and `grpc` share: metadata, restricted APIs, request parameters, live figures.

Decides the contents of these answers, and which names and keys are accepted. Does not know how either protocol encodes
its messages, nor sockets.

Callers: `http`, `grpc` and `cli`. Read `request_parameters` first.
"""
