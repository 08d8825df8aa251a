"""What the processes of a job say to each other: a store of keys that all see, behind `jax.distributed`."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Protocol

from jaxstate.errors import JaxstateError

PORT_S = 10.0
"""How long to wait for a port that an earlier start of the same job may be about to leave."""


class LinkError(JaxstateError):
    """The processes of a job cannot find each other as asked."""


class LinkLost(Exception):
    """Nothing is heard of the others any more; with `ours` because of the process beside this one."""

    def __init__(self, why: str, *, ours: bool = False):
        super().__init__(why)
        self.ours = ours


class Link(Protocol):
    """Requests to the store, of `jaxstate.serve.member._Member`; LinkLost when no answer comes."""

    @property
    def id(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def devices(self) -> str | None: ...
    def ask(self, op: str, **arguments: Any) -> Any: ...
    def leave(self, *, together: bool) -> None: ...


class OneProcess:
    """The store of a job of one process: a dictionary."""

    id, count, devices = 0, 1, None

    def __init__(self):
        self._keys: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def ask(self, op: str, **arguments: Any) -> Any:
        key = arguments["key"]
        with self._lock:
            if op in ("set", "tell"):
                self._keys[key] = arguments["value"]
            elif op == "get":
                return self._keys.get(key)
            elif op == "dir":
                return {k.removeprefix(key): v for k, v in self._keys.items() if k.startswith(key)}
            elif op == "add":
                self._counts[key] = self._counts.get(key, -1) + 1
                return self._counts[key]

    def leave(self, *, together: bool) -> None:
        pass


class ManyProcesses:
    """The store of a job of several, through the process beside this one (`jaxstate.serve.member`)."""

    def __init__(
        self, *, coordinator: str | None, count: int | None, id: int | None, join_s: float, silence_s: float
    ):  # fmt: skip
        """Join the others, in any order.

        Raises:
          LinkError: they did not all come within `join_s`, or there is too little to go by.
        """
        self._silence_s, self._lock, self._rest = silence_s, threading.Lock(), b""
        self._where = coordinator or "the address that the launcher gives"
        if id == 0 and coordinator is not None:
            _check_port(coordinator)
        self._errors = tempfile.TemporaryFile()
        self._member = subprocess.Popen(
            [sys.executable, "-m", "jaxstate.serve.member"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for us alone
        )  # fmt: skip
        named = {"coordinator_address": coordinator, "num_processes": count, "process_id": id}
        try:
            joined = self._ask(join_s + 60, "join", register_s=round(join_s), **named)
        except LinkLost as lost:
            raise LinkError(self._why_not(count, join_s)) from lost
        except BaseException:
            self._member.kill()
            raise
        self.id, self.count, self.devices = joined["id"], joined["count"], joined["devices"]

    def ask(self, op: str, **arguments: Any) -> Any:
        return self._ask(self._silence_s, op, **arguments)

    def leave(self, *, together: bool) -> None:
        """Leave the job; LinkLost never."""
        try:
            self._ask(15.0 if together else 2.0, "leave", together=together)
        except (LinkLost, LinkError):
            pass
        self._member.kill()
        self._member.wait()

    def _ask(self, timeout_s: float, op: str, **arguments: Any) -> Any:
        member = self._member
        assert member.stdin is not None
        with self._lock:
            try:
                member.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
                member.stdin.flush()
                answer = json.loads(self._line(time.monotonic() + timeout_s))
            except (OSError, ValueError) as error:
                raise self._lost() from error
        if "error" in answer:
            if op == "join":
                raise LinkError(_explained(answer["error"]))
            raise LinkLost(answer["error"].splitlines()[0])
        return answer["value"]

    def _line(self, deadline: float) -> bytes:
        assert self._member.stdout is not None
        fd = self._member.stdout.fileno()
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise LinkLost("it does not answer")
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise OSError("end of file")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _said(self) -> str:
        """What the process beside this one wrote to standard error until its end."""
        try:
            self._member.wait(5.0)
        except subprocess.TimeoutExpired:
            self._member.kill()
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _lost(self) -> LinkLost:
        status = re.search(r"absl::Status: (\w+: [^\n]+)", self._said())
        if status:
            return LinkLost(status[1])
        return LinkLost(f"exit status {self._member.returncode}", ours=True)

    def _why_not(self, count: int | None, join_s: float) -> str:
        said = self._said()
        if missing := re.search(r"timed out task names:\s+((?:\d+\s+)+)", said):
            ids = sorted({int(n) for n in missing[1].split()})
            names = f"process{'es' * (len(ids) > 1)} {', '.join(map(str, ids))}"
            return (
                f"{names} of {count or 'the job'} did not come up within {join_s:.0f} s; "
                "look there for what is wrong, then start all again"
            )
        return (
            f"process 0 did not come up: nothing answers at {self._where} within {join_s:.0f} s; look there for what "
            "is wrong, and whether this host can reach it"
        )


def _check_port(coordinator: str) -> None:
    """LinkError if somebody listens there already; the service would share the port, and the callers, with them."""
    port = coordinator.rpartition(":")[2]
    deadline = time.monotonic() + PORT_S
    while True:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", int(port)))
                tried.listen()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LinkError(
                        f"process 0 cannot listen at port {port}: {error.strerror}; is an earlier start of this job "
                        "still there? End it, or give --coordinator another port"
                    ) from error
        time.sleep(0.5)


def _explained(error: str) -> str:
    if "should be defined" in error or "must be defined" in error:
        return (
            "no launcher that JAX knows (Slurm, Open MPI, Kubernetes …) tells how many processes there are and where; "
            "give --processes N, --process-id I and --coordinator HOST:PORT"
        )
    return f"the processes cannot join: {error.splitlines()[0]}"
