"""Pictures of a compiled graph: text, DOT, Mermaid, SVG, PNG, HTML, JSON. No network is needed.

Decides: the formats (`formats`; `text` has text, DOT and Mermaid, each other format has its module), the layout of
drawings (`layout`, `scopes`), and the texts that pictures show (`labels`).

Does not know: how graphs are compiled (`graph`), files and deployments, requests. The live page adds current figures to
a picture itself.

Callers: `runtime`, `http`, `cli`, `authoring`.
"""
