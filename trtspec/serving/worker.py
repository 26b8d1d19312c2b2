"""One thread that owns a session: requests come in from any thread, answers go out step by step."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from trtspec.completion import StreamEvent, event_of
from trtspec.config import MAX_QUEUED
from trtspec.decode.generation import Generation
from trtspec.decode.stats import Stats
from trtspec.errors import ConfigError, DeadlineError, EngineError, QueueFullError, ShutdownError, TrtspecError
from trtspec.serving.request import Request
from trtspec.session import Session

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Who asked for a request. All are called in the worker's thread, and hold up every sequence while they run."""

    def send(self, event: StreamEvent) -> None:
        """What is new; the last event has a finish reason. An exception cancels the request."""

    def fail(self, error: TrtspecError) -> None:
        """The request ended without a result."""

    def gone(self) -> bool:
        """Whether nobody waits any more: asked before each step, and true cancels the request."""


class Observer(Protocol):
    """Who counts. Called in the worker's thread."""

    def stepped(self, told: Stats, active: int, queued: int) -> None:
        """A step is through.

        Args:
            told: what the events sent behind this call, and only they, tell clients.
            active: sequences with a slot.
            queued: requests without one.
        """


@dataclass(eq=False)
class _Job:
    """A request under way."""

    request: Request
    listener: Listener
    deadline: float | None
    generation: Generation | None = None
    told: Stats = field(default_factory=Stats)
    """What its events have told so far."""


class Worker:
    """Runs a session's steps in a thread of its own while there are requests.

    Between two steps it admits what arrived, drops what nobody waits for, and hands out what came. A request costs the
    same whatever else waits: nothing is done for all that wait.
    """

    def __init__(
        self, open_session: Callable[[], Session], *, max_queued: int = MAX_QUEUED, observer: Observer | None = None
    ) -> None:
        """Start the thread, which opens the session and measures what passes cost, and wait for that.

        Args:
            max_queued: requests that may wait for a slot.

        Raises:
            ConfigError: `max_queued` is less than 1.
            Exception: what `open_session` raises.
        """
        if max_queued < 1:
            raise ConfigError(f"max_queued is {max_queued}; give at least 1")
        self._max_queued = max_queued
        self._observer = observer
        self._arrived: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._queued = 0
        """Requests that the session holds and has no slot for, as of the last step."""
        self._closing = False
        self._drain_until = 0.0
        self._jobs: dict[Generation, _Job] = {}
        self._polled: deque[_Job] = deque()
        self._deadlines: list[tuple[float, int, _Job]] = []
        self._numbers = itertools.count()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(open_session,), name="trtspec-worker", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; its listener hears of it from now on.

        Raises:
            QueueFullError: as many as may wait are waiting.
            ShutdownError: the worker is closed or closing.
        """
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        with self._changed:
            if self._closing:
                raise ShutdownError("the server is shutting down; send the request to another one")
            if len(self._arrived) + self._queued >= self._max_queued:
                raise QueueFullError(
                    f"{self._max_queued} requests wait already; try again later, or serve with more instances or slots"
                )
            self._arrived.append(_Job(request, listener, deadline))
            self._changed.notify()

    def close(self, drain: float = 0.0, timeout: float = 5.0) -> None:
        """Take no more requests, and end; requests that are unfinished then fail with ShutdownError.

        Args:
            drain: seconds that requests under way may go on.
            timeout: seconds to wait for the step under way beyond that.

        Raises:
            EngineError: the step under way did not end in time.
        """
        with self._changed:
            if not self._closing:
                self._closing = True
                self._drain_until = time.monotonic() + drain
            self._changed.notify()
        self._thread.join(drain + timeout)
        if self._thread.is_alive():
            raise EngineError(f"the decode step under way has not ended within {timeout:g} s; stop the process")

    def _run(self, open_session: Callable[[], Session]) -> None:
        """The thread."""
        try:
            session = open_session()
        except BaseException as error:
            self._failure = error
            self._opened.set()
            return
        with session:
            try:
                session.prepare()
            except BaseException as error:
                self._failure = error
                return
            finally:
                self._opened.set()
            end: TrtspecError = ShutdownError("the server was shut down before the answer was complete")
            try:
                while self._wait():
                    self._turn(session)
            except Exception as error:
                logger.exception("the worker has ended; no more requests are taken")
                end = EngineError(f"the server's worker has failed ({error!r}); restart the server")
            finally:
                with self._changed:
                    self._closing = True
                self._fail_all(session, end)

    def _wait(self) -> bool:
        """Until there is something to do; false when it is time to end."""
        with self._changed:
            while not (self._arrived or self._jobs or self._closing):
                self._changed.wait()
            if not self._closing:
                return True
            return bool(self._arrived or self._jobs) and time.monotonic() < self._drain_until

    def _turn(self, session: Session) -> None:
        """Admit, drop, step, tell."""
        self._admit(session)
        self._drop_gone(session)
        self._drop_late(session)
        progressed: list[Generation] = []
        try:
            if self._jobs:
                progressed = session.step()
        except Exception as error:
            self._engine_failed(session, error)
        with self._changed:
            self._queued = session.num_waiting
            queued = self._queued + len(self._arrived)
        self._tell(session, [self._jobs[each] for each in progressed], len(session.running), queued)

    def _admit(self, session: Session) -> None:
        """Hand the session what arrived."""
        with self._changed:
            arrived, self._arrived = self._arrived, deque()
            # Until the step is through they all wait.
            self._queued += len(arrived)
        for job in arrived:
            request = job.request
            try:
                generation = session.submit(request.prompt, request.sampling, request.speculation)
            except Exception as error:
                # Whatever it is, it must not take those that arrived with it along.
                self._fail(job, error if isinstance(error, TrtspecError) else _bug(error))
                continue
            job.generation = generation
            self._jobs[generation] = job
            self._polled.append(job)
            if job.deadline is not None:
                heapq.heappush(self._deadlines, (job.deadline, next(self._numbers), job))

    def _drop_gone(self, session: Session) -> None:
        """Cancel sequences that nobody waits for: all that run are asked, those that wait one by one in turn."""
        for job in [self._jobs[generation] for generation in session.running] + self._next_polled():
            if job.generation in self._jobs and _gone(job):
                self._drop(session, job)

    def _next_polled(self) -> list[_Job]:
        """One request that waits, another one each time."""
        while self._polled:
            job = self._polled.popleft()
            if job.generation in self._jobs and job.generation is not None and job.generation.sequence.slot < 0:
                self._polled.append(job)
                return [job]
        return []

    def _drop_late(self, session: Session) -> None:
        """Fail what is past its deadline."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heapq.heappop(self._deadlines)[2]
            if job.generation in self._jobs:
                self._drop(session, job)
                seconds = job.request.timeout
                self._fail(job, DeadlineError(f"the answer was not complete within {seconds:g} s; allow more time"))
        if len(self._deadlines) > 2 * len(self._jobs) + 16:
            # Most belong to answers that were complete in time.
            self._deadlines = [entry for entry in self._deadlines if entry[2].generation in self._jobs]
            heapq.heapify(self._deadlines)

    def _drop(self, session: Session, job: _Job) -> None:
        assert job.generation is not None
        session.cancel(job.generation)
        del self._jobs[job.generation]

    def _tell(self, session: Session, jobs: list[_Job], active: int, queued: int) -> None:
        """Count what is new, then send it: who has an answer finds it counted."""
        due = [job for job in jobs if job.generation and (job.request.stream or job.generation.finished)]
        told = Stats()
        for job in due:
            assert job.generation is not None
            new = Stats()
            new.add(job.generation.stats)
            new.add(job.told, times=-1)
            job.told.add(new)
            told.add(new)
            if job.generation.finished:
                del self._jobs[job.generation]
        if self._observer is not None:
            with _logged("the figures of a step could not be counted"):
                self._observer.stepped(told, active, queued)
        for job in due:
            assert job.generation is not None
            try:
                job.listener.send(event_of(job.generation))
            except Exception:
                logger.warning("an answer could not be sent; its request is cancelled", exc_info=True)
                if job.generation in self._jobs:
                    self._drop(session, job)

    def _engine_failed(self, session: Session, error: Exception) -> None:
        """Fail what was running, whose KV may be half-written; what waits may have more luck."""
        logger.error("a step failed; the requests that were running fail with it", exc_info=error)
        told = error if isinstance(error, TrtspecError) else EngineError(f"a step failed: {error!r}")
        for generation in session.running:
            job = self._jobs[generation]
            self._drop(session, job)
            self._fail(job, told)

    def _fail_all(self, session: Session, error: TrtspecError) -> None:
        for job in list(self._jobs.values()):
            self._drop(session, job)
            self._fail(job, error)
        with self._changed:
            arrived, self._arrived = self._arrived, deque()
        for job in arrived:
            self._fail(job, error)

    def _fail(self, job: _Job, error: TrtspecError) -> None:
        with _logged("a request's failure could not be told"):
            job.listener.fail(error)


def _bug(error: Exception) -> EngineError:
    logger.error("a request could not be begun", exc_info=error)
    return EngineError(f"this is a bug in trtspec: {type(error).__name__}: {error}")


def _gone(job: _Job) -> bool:
    """Whether nobody waits; a listener that can't tell is taken for gone."""
    try:
        return job.listener.gone()
    except Exception:
        logger.warning("a request's state can't be asked for; it is cancelled", exc_info=True)
        return True


@contextlib.contextmanager
def _logged(message: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.warning(message, exc_info=True)
