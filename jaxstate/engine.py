"""The loop that owns the device: it compiles a few programs, feeds them plans and turns what comes back into events.

All that it works with is values; this is the one place that donates and keeps state between calls. A step is planned
and dispatched before the one before it is observed, so the host's work hides behind the device's.
"""

from __future__ import annotations

import collections
import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxstate import compilation, programs, scheduler
from jaxstate.errors import JaxstateError, RequestError, SpecError
from jaxstate.mesh import RankMesh
from jaxstate.models.base import CausalLM
from jaxstate.models.shards import divide
from jaxstate.plan import StepPlan
from jaxstate.prefix import OWN
from jaxstate.prefixes import Prefixes
from jaxstate.progress import Progress
from jaxstate.ranks import Ranks, RankStep
from jaxstate.request import MAX_STOP_IDS, Completion, Event, Request
from jaxstate.scheduler import Planned, Running, Schedule
from jaxstate.sizing import Sizes, choose
from jaxstate.state.cache import poison_by_default
from jaxstate.state.spec import CacheSpec
from jaxstate.stats import Stats
from jaxstate.step import EngineState, Outcome
from jaxstate.text import Tokenizer
from pallas_kernels import dispatch
from pallas_kernels.rows import CHUNK

Report = Callable[[str], None]

IN_FLIGHT = 2
"""Steps dispatched and not yet observed: one runs while the next is planned."""


class Engine:
    """Generates for many requests at once.

    Args:
      model: a `jaxstate.models` model; all its groups must be recurrent.
      sizes: static sizes, see `Sizes`; what is None is chosen for the device.
      tokenizer: turns tokens into text; without one, texts are empty and stop texts are refused.
      poison: fill memory that nobody may read with NaN (a debug mode); None reads JAXSTATE_POISON.
      report: called with a line of text when something takes time, such as compiling.

    Example:
      >>> engine = Engine(model, Sizes(rows=8), tokenizer=tokenizer)
      >>> engine.submit(Request("a", tuple(tokenizer.encode("Once upon a time"))))
      >>> for event in engine.run():
      ...     print(event.text, end="")
    """

    def __init__(
        self, model: CausalLM, sizes: Sizes | None = None, *, tokenizer: Tokenizer | None = None,
        poison: bool | None = None, report: Report | None = None,
    ):  # fmt: skip
        groups = model.groups()
        for group in groups:
            if group.kind != "recurrent":
                raise SpecError(
                    f"group {group.name!r} is {group.kind}; the engine runs models whose groups are all recurrent"
                )
        eos = tuple(model.config.eos_token_ids)
        if len(eos) > MAX_STOP_IDS:
            raise SpecError(
                f"the model has {len(eos)} end tokens; the engine compares at most {MAX_STOP_IDS}"
            )
        sizes = sizes or Sizes()
        divided = divide(model, sizes.tensor_parallel or 1)
        device = next(iter(jax.tree.leaves(model)[0].devices()))
        self.mesh = RankMesh.create(
            sizes.data_parallel or 1, sizes.tensor_parallel or 1, device, divided.leaf_axes
        )
        # A flat list of arrays costs a call far less than a module with as many parameters.
        self._params = self.mesh.place(divided)
        self.shape = choose(sizes, divided.groups, *self.mesh.devices)
        self.steps_per_dispatch = self.shape.decode_steps
        self.model, self.tokenizer = model, tokenizer
        self.poison = poison_by_default() if poison is None else poison
        self.stats = Stats(peak_blocks=dict.fromkeys(self.spec.names, 0))
        self.ranks = Ranks.create(self.shape, self.mesh.ranks)
        self._report = report or (lambda line: None)
        self._eos = eos
        self._queue: collections.deque[Request] = collections.deque()
        self._progress: dict[str, Progress] = {}
        self._in_flight: collections.deque[tuple[RankStep, Outcome]] = collections.deque()
        self._stepping = threading.Lock()
        self._news: list[Event] = []
        self._programs: dict[str, Any] = {}
        self.platform = device.platform
        runs = programs.runs(divided.tree, self.shape, self.platform, poison=self.poison)
        self._packings = {k: programs.packing(k, self.shape, poison=self.poison) for k in runs}
        self._jitted = {kind: self.mesh.program(run, divided) for kind, run in runs.items()}
        self._state: EngineState | None = None
        self.prefixes = Prefixes(self)
        if self.shape.checkpoints and self.spec.max_len < CHUNK + 2:
            self._report(
                f"prefixes cannot be reused: within max_len {self.spec.max_len} no prompt is longer than the {CHUNK} "
                "tokens at which states are kept"
            )

    @property
    def spec(self) -> CacheSpec:
        return self.shape.spec

    @property
    def rows(self) -> int:
        """Sequences in flight, over all ranks."""
        return self.spec.rows * self.mesh.ranks

    @property
    def schedule(self) -> Schedule:
        """The first rank's schedule, and often the only one."""
        return self.ranks.schedules[0]

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.ranks = self.ranks.put(0, schedule)

    @property
    def state(self) -> EngineState:
        """Tables, cache and rows on the devices, rank after rank, as of the last step; reading it waits for that."""
        if self._state is None:
            self._state = self.mesh.create_state(self.spec, poison=self.poison)
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state

    @property
    def idle(self) -> bool:
        """Whether every request has ended and its row and blocks are free again; there may be answers to read."""
        return self.ranks.idle and not (self._queue or self._in_flight or self._news)

    @property
    def calm(self) -> bool:
        """Whether nobody waits for anything: every request has ended, and its last event was given."""
        return not (self._progress or self._news)

    def lower(self, kind: str) -> Any:
        """The lowered program of that name in `kinds`, for a look at what will run."""
        return self._jitted[kind].lower(self._params, self.state, self.packed(kind))

    def packed(self, kind: str, plans: Sequence[StepPlan] | None = None) -> np.ndarray:
        """What the program of that name is handed for these plans of all ranks, or for plans that do nothing."""
        null = self.shape.nulls[kind == "prefill"]
        return self._packings[kind].pack(plans or [null] * self.mesh.ranks)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The programs: `prefill`, `decode` and, on a GPU, `decode_filtered`."""
        return tuple(self._jitted)

    def kernels(self) -> str:
        """What runs the ops of the programs, and why not our own kernels, in a line; nothing is compiled."""
        state = jax.eval_shape(lambda: self.mesh.create_state(self.spec, poison=self.poison))
        for kind in self.kinds:
            self._jitted[kind].trace(self._params, state, self.packed(kind))
        return dispatch.describe(dispatch.chosen())

    def compile(self) -> None:
        """Compiles all programs, saying so; the first step does it if nobody did."""
        if self._programs:
            return
        begin = time.perf_counter()
        self._programs = programs.compile_all(
            self.kinds, self.lower, self.shape, self.platform, self._report
        )
        self.stats.programs, self.stats.compile_s = len(self._programs), time.perf_counter() - begin
        jax.block_until_ready(self.state)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
          CapacityError: its prompt leaves no room for a token within `max_len`.
          RequestError: a duplicate id or one of the engine's own, a token the model does not know, stop texts without a
            tokenizer.
        """
        if request.id.startswith(OWN):
            raise RequestError(
                "unsupported_value",
                f"request id {request.id[:40]!r} begins with {OWN!r}, as only the engine's own do",
                "id",
            )
        if request.id in self._progress:
            raise RequestError(
                "duplicate_id",
                f"request id {request.id!r} is in use by a request that has not ended",
                "id",
            )
        self.check_tokens(request.prompt)
        if request.sampling.stop and self.tokenizer is None:
            raise RequestError(
                "unsupported_value", "stop texts need a tokenizer; use stop_ids", "stop"
            )
        budget = scheduler.budget_of(request, self.spec)
        # A copy of its own: whoever sends the same object again after an abort is not taken for its former self.
        request = copy.copy(request)
        self._progress[request.id] = Progress.start(request, budget, self._eos, self.tokenizer)
        self._queue.append(request)
        self.stats.requests += 1

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises RequestError unless the model knows all of the tokens."""
        vocab = self.model.config.vocab_size
        if not 0 <= min(tokens, default=0) <= max(tokens, default=0) < vocab:
            wrong = next(t for t in tokens if not 0 <= t < vocab)
            raise RequestError(
                "unsupported_value", f"token {wrong} is outside the vocabulary of {vocab}", "prompt"
            )

    def abort(self, request_id: str, *, quiet: bool = False) -> None:
        """Ends the request wherever it is; its last event, `aborted`, comes with the next step.

        With `quiet` there is no event. An id that is not known, or has ended, is ignored.
        """
        progress = self._progress.get(request_id)
        if progress is not None:
            self._queue = collections.deque(r for r in self._queue if r.id != request_id)
            event = self._end(progress, progress.finish("aborted"), None, discard=True)
            self._news += [] if quiet else [event]

    def preempt(self, request_id: str) -> None:
        """Takes the request's row away; it goes to the head of the queue and comes to the same tokens.

        Its text so far is made again from the deepest checkpoint of its prompt, in the same steps and so with the same
        bits; preempting it again before it is past that keeps it from its end. An id that is not known, or has no row,
        is ignored.
        """
        progress = self._progress.get(request_id)
        if progress is not None:
            progress.preempted = True
            for rank, before in enumerate(self.ranks.schedules):
                after = scheduler.preempt(before, request_id, tuple(progress.tokens))
                self.ranks = self.ranks.put(rank, after)
                self.stats.preemptions += after is not before

    def step(self) -> list[Event]:
        """Dispatches what can be dispatched, observes the oldest step, and returns the news.

        Raises:
          JaxstateError: another thread is in it; an engine serves one thread at a time.
        """
        if not self._stepping.acquire(blocking=False):
            raise JaxstateError(
                "another thread is in this engine's step(); an engine serves one thread"
            )
        try:
            return self._step()
        finally:
            self._stepping.release()

    def _step(self) -> list[Event]:
        self.compile()
        compiled = compilation.count()
        # What nobody waits for is done one step at a time, so that whoever comes finds the device free.
        spare = self.idle
        while len(self._in_flight) < (1 if spare else IN_FLIGHT) and self._dispatch(spare=spare):
            pass
        news, self._news = self._news, []
        assert self._in_flight or news or self.idle, f"no step can be planned: {self.ranks}"
        if self._in_flight:
            news += self._observe(*self._in_flight.popleft())
        self.stats.late_compilations += compilation.count() - compiled
        return news

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Event]:
        """Submits the requests as there is room for them and yields events until all have ended.

        One that `submit` refuses ends the run with its error; those submitted before it are aborted then, as they are
        when the iterator is closed early.
        """
        source, exhausted = iter(requests), False
        mine: set[str] = set()
        try:
            while True:
                while not exhausted and self.backlog < 2 * self.rows:
                    request = next(source, None)
                    exhausted = request is None
                    if request is not None:
                        self.submit(request)
                        mine.add(request.id)
                if exhausted and self.idle:
                    return
                for event in self.step():
                    if event.completion is not None:
                        mine.discard(event.id)
                    yield event
        finally:
            for request_id in mine:
                self.abort(request_id, quiet=True)

    @property
    def backlog(self) -> int:
        """Requests that wait for a row."""
        return len(self._queue) + self.ranks.waiting

    def _dispatch(self, *, spare: bool = False) -> bool:
        begin = time.perf_counter()
        room = max(0, min(len(self._queue), 2 * self.rows - self.ranks.waiting))
        self.ranks = self.ranks.submit(list(itertools.islice(self._queue, room)))
        for _ in range(room):
            self._queue.popleft()
        planned = self.ranks.plan_next(
            decode_steps=self.steps_per_dispatch, extra_stop_ids=self._eos, spare=spare
        )
        if planned is None:
            return False
        # The schedules move on only once the step is on its way: a plan that is refused leaves all as it was.
        after, step = planned
        kind = programs.of(step, self.kinds)
        packed = self.packed(kind, step.plans)
        state, outcome = self._programs[kind](self._params, self.state, packed)
        self._state, self.ranks = state, after
        self._in_flight.append((step, outcome))
        for rank, mine in enumerate(step.planned):
            for request_id in mine.preempted if mine is not None else ():
                progress = self._progress[request_id]
                progress.preempted = True
                made, before = tuple(progress.tokens), self.ranks.schedules[rank]
                self.ranks = self.ranks.put(rank, scheduler.recall(before, request_id, made))
        self.stats.dispatched(step, after)
        for plan, schedule in zip(step.plans, after.schedules, strict=True):
            for row in plan.admission.rows.nonzero()[0].tolist():
                self._admitted(schedule.rows[row])
        self.stats.plan_s += time.perf_counter() - begin
        return True

    def _observe(self, step: RankStep, outcome: Outcome) -> list[Event]:
        begin = time.perf_counter()
        outcome = jax.device_get(outcome)
        self.stats.wait_s += time.perf_counter() - begin
        events, rows = [], self.spec.rows
        for rank, planned in enumerate(step.planned):
            if planned is not None:
                mine = slice(rank * rows, (rank + 1) * rows)
                share = jax.tree.map(lambda x, mine=mine: x[:, mine], outcome)
                events += self._take(rank, planned, share)
        return events

    def _take(self, rank: int, planned: Planned, outcome: Outcome) -> list[Event]:
        """What a step that was seen to complete made on one rank."""
        # What it left behind may be read from now on, unless its writer broke.
        schedule, serves = self.ranks.schedules[rank], planned.serves
        bad = outcome.bad.any(axis=0)
        for row in bad.nonzero()[0].tolist():
            if (broken := serves[row]) is not None:
                schedule = scheduler.distrust(schedule, broken.request)
        self.ranks = self.ranks.put(rank, scheduler.publish(schedule, planned.staged))
        events, at = [], planned.at.tolist()
        for row, (tokens, logprobs) in enumerate(outcome.by_row()):
            running = serves[row]
            progress = self._progress.get(running.request.id) if running is not None else None
            # A request that ended meanwhile is no longer known, or its id is another's by now.
            if running is None or progress is None or progress.request is not running.request:
                continue
            event = progress.push(tokens, logprobs, at[row]) if tokens else None
            if bad[row] and (event is None or event.completion is None):
                event = progress.break_off(event)
            if event is None:
                continue
            if event.completion is not None:
                event = self._end(progress, event, rank)
            if event.tokens or event.text or event.completion is not None:
                events.append(event)
        return events

    def _admitted(self, running: Running | None) -> None:
        progress = self._progress.get(running.request.id) if running is not None else None
        if running is None or progress is None or running.order != running.age:
            return
        progress.cached, progress.miss = running.cached, running.miss
        self.stats.admitted(running)

    def _end(
        self, progress: Progress, event: Event, rank: int | None, *, discard: bool = False
    ) -> Event:
        request = progress.request
        del self._progress[request.id]
        # One that was preempted may by now wait on another rank than the one that it ran on.
        for where, schedule in enumerate(self.ranks.schedules):
            if where == rank or rank is None or progress.preempted:
                schedule = scheduler.end(schedule, request.id, discard=discard)
                self.ranks = self.ranks.put(where, schedule)
        done = event.completion
        if rank is not None and done is not None and done.finish_reason in ("stop", "length"):
            schedule = scheduler.keep_answer(self.ranks.schedules[rank], request, done.tokens)
            self.ranks = self.ranks.put(rank, schedule)
        self.stats.generated_tokens += len(progress.tokens)
        return event

    def completions(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """As `run`, yielding only what each request came to, in the order in which they end."""
        for event in self.run(requests):
            if event.completion is not None:
                yield event.completion

    def __repr__(self) -> str:
        return f"Engine({self.ranks}, {self.stats})"
