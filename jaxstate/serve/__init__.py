"""The command line: prompts from a file, results to a file. See `python -m jaxstate.serve --help`.

Reading order: `cli` (flags and exit codes), `batch` (the loop), `protocol` (lines to requests,
results to rows), `lines` and `files` (bytes in and out), `report` (progress and summary), `model`
(the only module here that loads one).
"""
