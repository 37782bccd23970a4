"""Reliability figures: the behaviour of a server under load, under faults and over time, measured from outside.

`python -m bench --figures` measures every figure of figures.py, `--chaos` injects random faults while every response is
checked (chaos.py), `--soak` mixes ordinary work with mistakes for a long time (soak.py). The models are in models.py, a
server with its checking clients in world.py. All are bounded in time, use loopback only and stop every process they
started. docs/reliability.md explains the table. Knows flowserve from outside only: its command line and HTTP.
"""
