"""The worker: requests of several threads answered by one session, and what goes wrong on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trtspec.completion import StreamEvent
from trtspec.config import SamplingParams, SpeculationConfig
from trtspec.decode.stats import Stats
from trtspec.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    PromptError,
    QueueFullError,
    ShutdownError,
    TrtspecError,
    UserError,
)
from trtspec.serving.request import Request
from trtspec.serving.worker import Worker
from trtspec.session import Session

LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=12, ignore_eos=True)


def request(prompt: Any = "one two three", sampling: SamplingParams = SHORT, **fields: Any) -> Request:
    speculation = SpeculationConfig(method=fields.pop("method", "ngram"))
    return Request(prompt, sampling, speculation, **{"stream": True, **fields})


class Caller:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[StreamEvent] = []
        self.error: TrtspecError | None = None
        self.has_left = False
        self.ended = threading.Event()
        self.first = threading.Event()

    def send(self, event: StreamEvent) -> None:
        assert not self.ended.is_set()
        self.events.append(event)
        self.first.set()
        if event.finish_reason:
            self.ended.set()

    def fail(self, error: TrtspecError) -> None:
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()

    def gone(self) -> bool:
        return self.has_left

    def wait(self) -> Caller:
        assert self.ended.wait(60)
        return self

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


class Counter:
    """An observer that adds up, and keeps the last state."""

    def __init__(self) -> None:
        self.told = Stats()
        self.active = self.queued = 0

    def stepped(self, told: Stats, active: int, queued: int) -> None:
        self.told.add(told)
        self.active, self.queued = active, queued


@pytest.fixture(scope="module")
def counter() -> Counter:
    return Counter()


@pytest.fixture(scope="module")
def worker(tiny_dir: Path, counter: Counter) -> Iterator[Worker]:
    worker = Worker(lambda: Session.open(tiny_dir), observer=counter)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def session(tiny_dir: Path) -> Iterator[Session]:
    with Session.open(tiny_dir) as session:
        yield session


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


def ask(worker: Worker, asked: Request) -> Caller:
    caller = Caller()
    worker.submit(asked, caller)
    return caller


def test_answers_are_those_of_a_session(worker: Worker, session: Session, counter: Counter) -> None:
    before = counter.told.emitted_tokens
    asked = [
        request(f"number {number} {'again ' * number}", method=method, stream=number % 2 == 0)
        for number, method in enumerate(["none", "ngram"] * 10)
    ]
    callers = [Caller() for _ in asked]
    threads = [
        threading.Thread(target=worker.submit, args=(each, caller)) for each, caller in zip(asked, callers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for each, caller in zip(asked, callers, strict=True):
        [expected] = session.generate([each.prompt], each.sampling, each.speculation)
        assert caller.wait().token_ids == expected.token_ids
        assert caller.text == expected.text
        completion = caller.events[-1].completion
        assert completion is not None and completion.text == expected.text
        assert len(caller.events) == 1 or each.stream
        assert sum(event.draft_tokens for event in caller.events) == completion.stats.draft_tokens
        assert sum(event.accepted_tokens for event in caller.events) == completion.stats.accepted_tokens
    # The first token of each comes of its prompt, not of a decode step.
    emitted = sum(len(caller.token_ids) - 1 for caller in callers)
    assert counter.told.emitted_tokens - before == emitted
    until(lambda: counter.active == counter.queued == 0)


def test_seeded_answers_do_not_depend_on_the_others(worker: Worker, session: Session) -> None:
    asked = [
        request("red green blue", SamplingParams(max_new_tokens=16, temperature=1.0, seed=seed, ignore_eos=True))
        for seed in range(6)
    ]
    callers = [ask(worker, each) for each in asked]
    for each, caller in zip(asked, callers, strict=True):
        [expected] = session.generate([each.prompt], each.sampling, each.speculation)
        assert caller.wait().token_ids == expected.token_ids


def test_a_wrong_request_fails_alone(worker: Worker, session: Session) -> None:
    good = ask(worker, request())
    empty, unknown, long = (ask(worker, request(prompt)) for prompt in ("", [10**9], "word " * 5000))
    headless = ask(worker, request(method="eagle"))
    for caller, kind in ((empty, PromptError), (unknown, PromptError), (long, PromptError), (headless, ConfigError)):
        assert isinstance(caller.wait().error, kind)
        assert caller.events == []
    assert good.wait().token_ids == session.generate(["one two three"], SHORT)[0].token_ids


def test_who_left_frees_the_slot(worker: Worker, counter: Counter, session: Session) -> None:
    slots = session.limits.max_batch_size
    callers = [ask(worker, request(sampling=LONG)) for _ in range(slots + 3)]
    until(lambda: counter.active == slots)
    for caller in callers:
        caller.has_left = True
    until(lambda: counter.active == counter.queued == 0)
    assert not any(caller.ended.is_set() for caller in callers)
    assert len(ask(worker, request()).wait().token_ids) == SHORT.max_new_tokens


class Broken(Caller):
    """A listener whose connection is lost."""

    def send(self, event: StreamEvent) -> None:
        self.first.set()
        raise OSError("connection lost")

    def fail(self, error: TrtspecError) -> None:
        raise OSError("connection lost")


def test_a_listener_that_raises_is_dropped(worker: Worker, counter: Counter) -> None:
    broken, good = Broken(), Caller()
    worker.submit(request(sampling=LONG), broken)
    worker.submit(request(""), Broken())
    worker.submit(request(), good)
    assert broken.first.wait(60)
    assert len(good.wait().token_ids) == SHORT.max_new_tokens
    until(lambda: counter.active == 0)


def test_a_deadline_ends_a_request(worker: Worker, counter: Counter) -> None:
    late = ask(worker, request(sampling=LONG, timeout=0.05))
    in_time = ask(worker, request(timeout=60.0))
    assert isinstance(late.wait().error, DeadlineError)
    assert len(in_time.wait().token_ids) == SHORT.max_new_tokens
    until(lambda: counter.active == 0)


def test_finished_requests_are_forgotten(worker: Worker, counter: Counter) -> None:
    for _ in range(40):
        ask(worker, request(sampling=SamplingParams(max_new_tokens=1), timeout=600.0)).wait()
    until(lambda: not worker._jobs)
    assert len(worker._deadlines) <= 17
    assert len(worker._polled) <= 1


def test_a_full_queue_refuses_at_once(tiny_dir: Path) -> None:
    counter = Counter()
    worker = Worker(lambda: Session.open(tiny_dir), max_queued=2, observer=counter)
    running: list[Caller] = []
    for count in range(1, 9):
        running.append(ask(worker, request(sampling=LONG)))
        until(lambda: counter.active == count)  # noqa: B023 - called at once
    waiting = [ask(worker, request()) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait"):
        worker.submit(request(), Caller())
    worker.close()
    for caller in running + waiting:
        assert isinstance(caller.wait().error, ShutdownError)
    with pytest.raises(ShutdownError):
        worker.submit(request(), Caller())


def test_draining_lets_requests_finish(tiny_dir: Path) -> None:
    worker = Worker(lambda: Session.open(tiny_dir))
    callers = [ask(worker, request()) for _ in range(3)]
    worker.close(drain=60.0)
    assert [len(caller.wait().token_ids) for caller in callers] == [SHORT.max_new_tokens] * 3


def test_a_session_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        Worker(lambda: Session.open(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="max_queued"):
        Worker(lambda: Session.open(tmp_path), max_queued=0)


class Failing:
    """A session whose steps fail while `broken` is set, and which can't begin the prompt "bug"."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *reason: object) -> None:
        self._session.close()

    def submit(self, prompt: Any, *options: Any) -> Any:
        if prompt == "bug":
            raise KeyError("nobody thought of this")
        return self._session.submit(prompt, *options)

    def step(self) -> Any:
        if self.broken:
            raise RuntimeError("the GPU fell off the bus")
        return self._session.step()


def test_a_failed_step_ends_what_was_running(tiny_dir: Path) -> None:
    sessions: list[Failing] = []

    def open_session() -> Any:
        sessions.append(Failing(Session.open(tiny_dir)))
        return sessions[0]

    worker = Worker(open_session)
    running = ask(worker, request(sampling=LONG))
    assert running.first.wait(60)
    sessions[0].broken = True
    error = running.wait().error
    assert isinstance(error, EngineError) and "fell off the bus" in str(error)
    sessions[0].broken = False
    assert len(ask(worker, request()).wait().token_ids) == SHORT.max_new_tokens
    worker.close()


def test_a_request_that_cannot_be_begun_takes_no_other_along(tiny_dir: Path) -> None:
    def open_session() -> Any:
        return Failing(Session.open(tiny_dir))

    worker = Worker(open_session)
    busy = ask(worker, request(sampling=LONG))
    assert busy.first.wait(60)
    # During one step, so that they are begun together.
    callers = [ask(worker, request(prompt)) for prompt in ("bug", "one two", "three")]
    assert "nobody thought of this" in str(callers[0].wait().error)
    assert [len(caller.wait().token_ids) for caller in callers[1:]] == [SHORT.max_new_tokens] * 2
    assert len(busy.wait().token_ids) == LONG.max_new_tokens
    worker.close()
