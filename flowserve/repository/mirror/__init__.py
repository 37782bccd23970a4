"""Repositories in a store for objects (`s3://…`), kept as folders on this machine.

Decides what a listing of the store means (`listing`, pure), what is fetched and when it is put in force (`mirror`), and
how a store is asked (`storage`, the only module that imports fsspec). Everything else reads folders, and no backend
ever sees a URL. Does not know models, configurations or when the store is asked. Callers: `cli`, `runtime/loading`.
"""
