"""Measurements of flowserve over real HTTP: `python -m bench`. Nothing of the product imports this package.

docs/performance.md says how to run it and how to read what it prints.
"""
