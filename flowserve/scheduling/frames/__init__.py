"""Where a request is: its record, and the frames of its graph that are being computed.

Decides which steps of a frame are ready, how the rows of a step are divided into parts, what a response of a decoupled
step begins, when a tensor has no reader left, and when a request is over. Does not know queues, batches, instances,
clocks or the contents of tensors. Called by the scheduler and by streaming/.

request.py has the record of a request, frame.py the frame of a plain graph and the ticket of a step. A graph with
`when`, `each`, decoupled steps or shared limits has frames of borders.py, which is the only module that decides by the
kind of a region: operations.py makes the tensors at the border of a space, parts.py divides the rows of a step,
stream.py has the responses of a request, ranges.py the rows that such a response has, slots.py the limits of steps
under way.
"""
