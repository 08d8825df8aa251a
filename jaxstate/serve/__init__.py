"""The command line: prompts from a file, results to a file. See `python -m jaxstate.serve --help`.

Reading order: `cli` (flags and exit codes), `batch` (the loop), `protocol` (lines to requests,
results to rows), `lines` and `files` (bytes in and out), `report` (progress and summary), `model`
(the only module here that loads one). Several processes as one job: `work` (what differs from a run
alone), `team` (who is there, and well), `share` (whose line is which), `parts` (rows until the end),
`link` and `member` (how they hear of each other, through `jax.distributed`).
"""

from __future__ import annotations

import os


def serve(model: str | os.PathLike, **options: str | int | float | bool | os.PathLike) -> int:
    """Do what the command line does, with its flags as keywords; the exit code.

    Called in every process of a job, each with its own `process_id`, it is the job, as on the command line.

    Example:
      >>> serve("demo", input="prompts.jsonl", output="results.jsonl", max_tokens=32,
      ...       processes=4, process_id=0, coordinator="node0:8476")
    """
    from jaxstate.serve.cli import main

    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not False:
            words.append(flag if value is True else f"{flag}={value}")
    return main(["batch", os.fspath(model), *words])
