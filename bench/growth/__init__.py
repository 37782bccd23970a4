"""How cost grows: with steps, deployments, connections and sequences.

`python -m bench --growth` measures each part (steps.py, deployments.py, connections.py, sequences.py) at growing sizes.
readings.py has the figures of one size and their summary over several rounds, loads.py the clients that all parts use,
growth.py the parts and the order of the rounds, report.py the tables and the plot. Every round starts its servers anew
and reverses the order of the sizes. Knows flowserve from outside only: its command line, HTTP and /proc.
"""
