"""Compare how flowserve and Triton serve the same repositories: `python -m tests.compatibility FOLDER`.

`repositories` finds the repositories of a folder and copies them, `stand_ins` replaces what a copy lacks, `servers`
starts both servers, `requests` makes the same requests for both, `observe` records their answers, `differences`
compares these, `known` names the documented differences, `report` prints the result.
"""
