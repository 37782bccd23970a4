"""Which models of a graph run in the server, and which on other machines.

Decides what an assignment of models to kinds of machines costs (`costs`), finds a cheap one (`search`), and which
neighbours on one kind of machine could run as one step (`groups`). Pure: figures come in as numbers. Does not know how
they were measured, graphs' records, or placement files. Caller: `cli`.
"""
