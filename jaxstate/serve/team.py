"""The processes of one job: that all are there, that all are well, and who does what.

Every process has the store told every second that it is well. Process 0 looks after all of them and every other after
process 0. Whoever finds one gone, or ends itself before the job does, says so in the store, and all stop between two
steps with that message. Rows that were written stay, and a later start goes on from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxstate.serve.link import Link, LinkError, LinkLost

STOP_S = 8.0
"""How long a process may take to come to a place where it can stop, before it is ended where it is."""


class Stopped(Exception):
    """The job cannot go on, because of another process or because the others took this one for gone."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A process of the job."""

    id: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.id} ({self.host}, pid {self.pid})"


class Team:
    """This process's part in a job of `link.count`; enter it to join, and leave it when the job is done.

    Args:
      link: to the others.
      silence_s: a process that has not been heard of for so long is gone.
      give_up: called with the message when this process cannot come to a place where it can stop.

    Attributes:
      pause: called again and again while others are waited for.
      tells: what the others may hear of this process's work.
    """

    def __init__(self, link: Link, silence_s: float, give_up: Callable[[str], None]):
        self.id, self.count, self._link = link.id, link.count, link
        self._silence_s, self._give_up = silence_s, give_up
        self._beat_s = min(1.0, silence_s / 5)
        self._trouble: str | None = None
        self._noticed, self._over = threading.Event(), threading.Event()
        self._well = time.monotonic()
        self.pause: Callable[[], None] = lambda: None
        self.tells: Callable[[], dict[str, Any]] = dict
        self.told: dict[int, dict[str, Any]] = {}
        self.peers = {self.id: Peer(self.id, socket.gethostname(), os.getpid())}
        self.done = False

    @property
    def me(self) -> Peer:
        return self.peers[self.id]

    def __enter__(self) -> Team:
        try:
            self._meet()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _meet(self) -> None:
        me = self.me
        self._ask("last_words", key=f"stop/{me.id}", value=f"{me} is gone")
        threading.Thread(target=self._watch, daemon=True).start()
        hello = {"peer": dataclasses.asdict(me), "count": self.count}
        there = self.gather("hello", hello, self._same_count)
        self.peers = {id: Peer(**said["peer"]) for id, said in there.items()}
        if self.id == 0:  # names this start's files; later starts sort after it
            self.put("start", f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}")
        self.start = str(self.wait("start"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        self._over.set()
        self._noticed.set()
        if self.done:
            self._link.leave(together=True)
            return
        with contextlib.suppress(LinkLost):
            # Told here too: the watch may not have come to it, and the others would take who leaves first for gone.
            self._tell(self._trouble or f"{self.me} stopped: {_said(error)}")
            self._link.ask("set", key=f"left/{self.id}", value="", overwrite=True)
            end = time.monotonic() + 2 * self._beat_s + 1
            while self.id == 0 and time.monotonic() < end:  # the store ends with this process
                if len(self._link.ask("dir", key="left/")) == self.count:
                    break
                time.sleep(0.1)
        self._link.leave(together=False)

    def check(self) -> None:
        """Raise Stopped if the job cannot go on; cheap enough for every step."""
        if self._trouble is None and time.monotonic() - self._well > self._silence_s:
            self._listen()  # it was stopped, or starved: the others may have gone
        if self._trouble is not None:
            self._noticed.set()
            raise Stopped(self._trouble)

    def claim(self, what: str) -> int:
        """The next number that nobody in the job has, from 0."""
        return self._ask("add", key=what)

    def put(self, key: str, value: Any) -> None:
        """Tell all."""
        self._ask("set", key=key, value=json.dumps(value))

    def wait(self, key: str) -> Any:
        """What `put` told, as soon as somebody has."""
        while (value := self._ask("get", key=key)) is None:
            self._pause()
        return json.loads(value)

    def gather(
        self, what: str, value: Any, check: Callable[[dict[int, Any]], None] = lambda there: None
    ) -> dict[int, Any]:
        """What all processes say here, each its own, once all have; `check` sees it as it comes."""
        self.put(f"{what}/{self.id}", value)
        while True:
            said = self._ask("dir", key=f"{what}/")
            there = {int(id): json.loads(words) for id, words in sorted(said.items())}
            check(there)
            if len(there) >= self.count:
                return there
            self._pause()

    def _same_count(self, there: dict[int, Any]) -> None:
        for said in there.values():
            if said["count"] != self.count:
                raise LinkError(
                    f"{Peer(**said['peer'])} was started as one of {said['count']}, and {self.me} as one of "
                    f"{self.count}; give all the same --processes"
                )

    def _pause(self) -> None:
        self.check()
        self.pause()
        time.sleep(0.1)

    def _ask(self, op: str, **arguments: Any) -> Any:
        self.check()
        try:
            return self._link.ask(op, **arguments)
        except LinkLost as lost:
            self._stop(self._told_of(lost))
            self.check()

    def _watch(self) -> None:
        heard: dict[int, tuple[int, float]] = {}
        beat = 0
        while self._trouble is None and not self._over.wait(self._beat_s):
            beat += 1
            try:
                self._listen()
                said = json.dumps({"beat": beat, **self.tells()})
                self._link.ask("tell", key=f"beat/{self.id}", value=said)
                self._look_after(heard)
            except LinkLost as lost:
                self._stop(self._told_of(lost))
            except Exception as error:  # nobody else would tell of it
                self._stop(f"{self.me} cannot look after the others: {error!r}")
        if self._over.is_set() or self._trouble is None:
            return
        with contextlib.suppress(LinkLost):
            self._tell(self._trouble)
        if not self._noticed.wait(STOP_S):
            self._give_up(self._trouble)

    def _listen(self) -> None:
        """Hear whether somebody has stopped the job."""
        try:
            if stops := self._link.ask("dir", key="stop/"):
                self._stop(next(iter(stops.values())))
        except LinkLost as lost:
            self._stop(self._told_of(lost))
        self._well = time.monotonic()

    def _look_after(self, heard: dict[int, tuple[int, float]]) -> None:
        ask = self._link.ask
        beats = ask("dir", key="beat/") if self.id == 0 else {"0": ask("get", key="beat/0")}
        now = time.monotonic()
        for id, said in beats.items():
            if said is not None:
                self.told[int(id)] = told = json.loads(said)
                if heard.get(int(id), (0, 0.0))[0] != told["beat"]:
                    heard[int(id)] = told["beat"], now
        for id in self.peers if self.id == 0 else (0,):
            _, when = heard.setdefault(id, (0, now))
            if id != self.id and now - when > self._silence_s:
                self._stop(f"{self._name(id)} has not been heard of for {now - when:.0f} s")

    def _told_of(self, lost: LinkLost) -> str:
        """What it means that the store does not answer."""
        if twice := re.search(r"(\d+) unexpectedly tried to connect", str(lost)):
            return f"{self._name(int(twice[1]))} was started a second time; end all and start the job again"
        if lost.ours:
            return f"{self.me} cannot reach the others: the process beside it is gone ({lost})"
        return f"{self._name(0)} is gone: {lost}"

    def _stop(self, why: str) -> None:
        if self._trouble is None:
            self._trouble = why

    def _tell(self, why: str) -> None:
        words = {"key": f"stop/{self.id}", "value": why}
        self._link.ask("set", **words, overwrite=True)
        self._link.ask("last_words", **words)

    def _name(self, id: int) -> str:
        return str(self.peers.get(id, f"process {id}"))


def _said(error: BaseException | None) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
