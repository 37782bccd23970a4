"""User configuration: from text to checked records.

Decides: the grammar of config.pbtxt and JSON (`syntax`, `build`, `parse`), the numbered rules for a single
configuration (`rules`), the merge with the declarations of the model's own file and the defaults (`complete`), which
fields are refused or ignored (`unsupported`), and the records for other packages (`types`).

Does not know: the model's own files (backends read them and pass a `Completion`), other configurations (`graph`),
folders of a repository (`repository`), execution. protobuf is imported here and in `grpc` only.

Callers: every package above it. Entry points: `load.read_draft`, `load.validate`, `parse.parse`.
"""
