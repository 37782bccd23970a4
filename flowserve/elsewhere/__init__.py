"""Models that run elsewhere: instances on other machines, models of other servers, and proposals of a placement.

Decides nothing about a server without them: the core imports none of these modules. `wing` is what the command line
plugs into an engine.
"""
