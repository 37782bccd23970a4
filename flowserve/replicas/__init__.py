"""Several whole servers behind one port: `flowserve run --workers N`.

Each server is a process, called a replica here, that loads every model and has its own engine. A small parent process
accepts connections and passes them on, starts and restarts replicas, has operations on models carried out by all or
none, and adds up their figures. Importing this package imports nothing else; its modules are imported by the command
line, only with --workers.
"""
