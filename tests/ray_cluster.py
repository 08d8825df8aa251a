"""A local Ray cluster of two workers, one of which is killed in the middle of a batch; then a snippet.

python tests/ray_cluster.py ROWS.json KWARGS.json MARK SNIPPET.py OUT.json
"""

import json
import os
import signal
import sys
from pathlib import Path

import ray
import ray.data

from jaxstate import Sizes
from jaxstate.ray import Worker

STEPS = 4
"""Steps that a worker makes before it is killed."""


class Killed(Worker):
    """A worker that is killed once, by whoever is the first to come so far."""

    def __init__(self, mark: str, sizes: dict, **given):
        super().__init__(sizes=Sizes(**sizes), **given)
        self._mark, self._made, step = Path(mark), 0, self.lm.engine.step

        def counted():
            self._made += 1
            if self._made == STEPS:
                try:
                    self._mark.touch(exist_ok=False)
                except FileExistsError:
                    return step()
                os.kill(os.getpid(), signal.SIGKILL)
            return step()

        self.lm.engine.step = counted  # pyright: ignore

    def __call__(self, batch):
        there = len(next(iter(batch.values())))
        return {**super().__call__(batch), "pid": [os.getpid()] * there}


def main() -> None:
    rows, given, mark, snippet, out = sys.argv[1:]
    ray.init(
        num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, logging_level="ERROR"
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    made = (
        ray.data.from_items(json.loads(Path(rows).read_text()))
        .map_batches(
            Killed, fn_constructor_kwargs={**json.loads(Path(given).read_text()), "mark": mark},
            compute=ray.data.ActorPoolStrategy(size=2), batch_size=6, max_restarts=4, max_task_retries=4,
        ).take_all()
    )  # fmt: skip
    names = {}
    exec(compile(Path(snippet).read_text(), snippet, "exec"), names)
    shown = names["results"].take_all()
    with open(out, "w") as file:
        json.dump({"rows": made, "shown": shown}, file, default=lambda x: x.tolist())


if __name__ == "__main__":
    main()
