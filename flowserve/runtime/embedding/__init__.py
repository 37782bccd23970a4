"""The engine embedded in a program: under trio (`embedded`), and on a thread of its own for blocking code and for
asyncio (`engine_thread`).

Decides how arrays become a request, how responses become arrays, and on which thread the engine runs. Does not know
graphs in Python (`authoring/`), nor how requests run.

Callers: `authoring` (`flowserve.Engine`), `cli` and `testing`. Read `embedded` first.
"""
