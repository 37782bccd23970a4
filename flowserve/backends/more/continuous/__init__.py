"""A template for engines that batch by themselves at each step (continuous batching), such as those of language models.

Decides what an engine has to provide, and makes a decoupled backend of it whose requests wait in the server's queue:
an instance is busy while its engine has no seat for another sequence, so that the next request can still be listed,
cancelled, overtaken by another priority, or timed out. It imports no engine and knows none by name.

| module | decides |
|---|---|
| interface | what an engine provides |
| backend | completion, loading, and the process of each engine |
| instance | how requests enter the engine, how their responses are sent, and what ends them |

Callers: the backend vllm.
"""
