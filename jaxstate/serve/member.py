"""The process beside each process of a job, which joins `jax.distributed` in its place.

JAX's runtime ends a process that has joined, by `abort`, as soon as another is gone: before it could say which, and in
the middle of whatever it does. It also numbers devices over all processes, so that programs compiled in one are not
found by another, and lets only the first keep them. A job of processes that share nothing needs none of that. It needs
what the runtime's coordination service gives beside it: who is there, and a store of keys that all see. So this process
joins, and answers one request a line about the store; its process hears from its end what the runtime would have ended
*it* for (`jaxstate.serve.link`).

It says every second that its process is well, which that could not while it compiles or waits for a processor, and not
while that is stopped. When its process is gone it tells the others, which is faster than missing its heartbeats.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

BEAT_S = 1.0

LINGER_S = 4.0
"""How long the service goes on when the process beside it is gone, for the others to hear of that."""


def main() -> None:
    """Join as the first request says, then answer requests until the input ends."""
    for signum in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # launchers send them to all; ours says when to end
        signal.signal(signum, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    member = _Member()
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(requests, member), daemon=True).start()
    while True:
        request = requests.get()
        try:
            answer = {"value": getattr(member, request.pop("op"))(**request)}
        except Exception as error:
            answer = {"error": f"{error}", "kind": type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)
        if member.ended:
            os._exit(0)  # the runtime's own way out waits for others


class _Member:
    def __init__(self):
        self.ended = False
        self._client: Any = None
        self._last: tuple[str, str] | None = None
        self._serves = False
        self._beats: tuple[str, dict[str, Any]] | None = None

    def join(self, register_s: int, **options: Any) -> dict[str, Any]:
        """Join; which of how many this is, and the devices that are its own where a launcher says so."""
        import jax
        from jax._src import distributed, xla_bridge  # neither store nor devices have a public name
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        # How long the service waits for all is no option of jax.distributed, and it alone knows who did not come.
        service = _jax.get_distributed_runtime_service
        wait = functools.partial(service, cluster_register_timeout=register_s)
        _jax.get_distributed_runtime_service = wait
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            initialization_timeout=register_s + 5, shutdown_timeout_seconds=10, **options
        )
        state = distributed.global_state
        self._client, self._serves = state.client, state.process_id == 0
        return {
            "id": state.process_id,
            "count": state.num_processes,
            "devices": xla_bridge.CUDA_VISIBLE_DEVICES.value,
        }

    def set(self, key: str, value: str, overwrite: bool = False) -> None:
        self._client.key_value_set(key, value, allow_overwrite=overwrite)

    def tell(self, key: str, value: str) -> None:
        """Say this every second from now on, with a count of how often."""
        first = self._beats is None
        self._beats = key, json.loads(value)
        if first:
            threading.Thread(target=self._beat, daemon=True).start()

    def get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def dir(self, key: str) -> dict[str, str]:
        return {
            name.removeprefix(key): value for name, value in self._client.key_value_dir_get(key)
        }

    def add(self, key: str) -> int:
        """Count up; the first gets 0."""
        return self._client.key_value_increment(key, 1) - 1

    def last_words(self, key: str, value: str) -> None:
        """Keep what to tell the others should the process beside this one be gone without a word."""
        self._last = key, value

    def leave(self, together: bool) -> None:
        """End; `together` waits for all to leave, so that nobody takes it for a fault."""
        self._last, self.ended = None, True
        if together:
            import jax

            jax.distributed.shutdown()

    def _beat(self) -> None:
        beat = 0
        while not self.ended:
            if not _is_stopped(os.getppid()):
                assert self._beats is not None
                beat, (key, value) = beat + 1, self._beats
                self.set(key, json.dumps(value | {"beat": beat}), overwrite=True)
            time.sleep(BEAT_S)

    def left_alone(self) -> None:
        """The process beside this one is gone."""
        if self._last is not None and not self.ended:
            self.set(*self._last)
            if self._serves:
                time.sleep(LINGER_S)
        os._exit(1)


def _is_stopped(pid: int) -> bool:
    """Whether a process is suspended, where the system tells."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] in "Tt"


def _read(requests: queue.Queue[dict[str, Any]], member: _Member) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    try:
        member.left_alone()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
