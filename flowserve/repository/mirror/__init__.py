"""Repositories in an object store (`s3://…`), mirrored to folders on this machine.

Decides what a listing of the store means (`listing`, pure), what is fetched and when it is put in force (`mirror`), and
how a store is accessed (`storage`, the only module that imports fsspec). All other code reads folders, and no backend
gets a URL. Does not know models, configurations or when the store is polled. Callers: `cli`, `runtime/loading`.
"""
