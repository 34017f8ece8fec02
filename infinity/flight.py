"""What is in flight, and the only waiting on the training path.

Everything submitted goes through ``Flight``: it remembers the last task of each piece of work and what its completion sets off, and
counts the time spent waiting. It decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from infinity.errors import EngineFailedError, InfinityError
from infinity.layout import PageId
from infinity.residency import PageState
from infinity.store import PageStore
from infinity.task_queue import Batch, TaskQueue

IN_FLIGHT = frozenset({PageState.FETCHING, PageState.WRITING, PageState.CHAINED})
"""States in which a page is in the hands of the queue."""

_NOTHING = (None, None)


class Bookkeeping:
    """A stretch of code that must not be cut in half: what cuts it, a KeyboardInterrupt say, stops the engine for good."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, InfinityError):
            self._flight.fail(error)


class Flight:
    """Work handed to the queue. Order: ``poll`` whenever there is time, ``wait_*`` when there is nothing else to do."""

    def __init__(self, queue: TaskQueue, store: PageStore) -> None:
        self.queue = queue
        self.store = store
        self.stall_s = 0.0
        self.irrevocable = False
        """Is an update in flight? A failure then leaves weights that nobody can trust."""
        self.on_idle: Callable[[], bool] = lambda: False
        """What may still bring something when the queue has nothing in flight (copies of the device); False when nothing can."""
        self._when_done: dict[int, tuple[Callable[[], None] | None, Callable[[], None] | None]] = {}
        self._failure: BaseException | None = None
        self.bookkeeping = Bookkeeping(self)

    @property
    def idle(self) -> bool:
        """Is nothing in flight?"""
        return not self._when_done

    def submit(self, batch: Batch) -> int:
        """Hands a batch over and tells the store; the id of its first task."""
        self.check()
        first = self.queue.submit(batch)
        self.store.submitted(first)
        return first

    def track(self, task: int, done: Callable[[], None] | None = None, failed: Callable[[], None] | None = None) -> None:
        """Counts ``task`` as the end of a piece of work; ``done`` is called once it has ended well, ``failed`` when it did not."""
        self._when_done[task] = done, failed

    def submit_work(self, batch: Batch, last: int, done: Callable[[], None] | None = None) -> int:
        """Hands a batch over whose work ends with the task of handle ``last``; its id."""
        task = self.submit(batch) - 1 - last
        self.track(task, done)
        return task

    def submit_each(
        self,
        batch: Batch,
        handles: Sequence[int],
        done: Callable[[], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> list[int]:
        """Hands a batch over in which each of ``handles`` ends a piece of work of its own; their ids. Nothing where there is none."""
        if not handles:
            return []
        first = self.submit(batch)
        tasks = [first - 1 - handle for handle in handles]
        for task in tasks:
            self.track(task, done, failed)
        return tasks

    def poll(self) -> None:
        """Applies what has ended; never waits.

        Errors: IoError, CorruptPageError or KernelError of the first task that failed by itself.
        """
        self.check()
        with self.bookkeeping:
            completions = self.queue.poll()
            if not completions:
                return
            actions = []
            for completion in completions:
                done, failed = self._when_done.pop(completion.id, _NOTHING)
                action = done if completion.status == 0 else failed
                if action is not None:
                    actions.append(action)
            try:
                self.store.settle(completions)
            except InfinityError as error:
                if self.irrevocable or self.store.has_failed_chains:
                    self._failure = error
                raise
            finally:
                for action in actions:
                    action()

    def wait_any(self, wanted: Iterable[int] = ()) -> None:
        """Waits until the first of ``wanted`` that is in flight has ended; where none is, the oldest piece of work.

        Errors: as ``poll``; InfinityError when nothing is in flight, because then nothing can ever come.
        """
        if self.idle and self.on_idle():
            return
        if self.idle:
            raise InfinityError(
                f"nothing is in flight and there are no frames to go on with ({self.store.frames_free} free): a fault of infinity"
            )
        self.wait_for((next((task for task in wanted if task in self._when_done), None) or next(iter(self._when_done)),))

    def wait_for(self, tasks: Iterable[int]) -> None:
        """Waits until all of ``tasks`` have ended."""
        began = time.perf_counter()
        try:
            self.queue.wait(tuple(tasks))
        finally:
            self.stall_s += time.perf_counter() - began
        self.poll()

    def wait_all(self) -> None:
        """Waits until nothing is in flight."""
        while not self.idle:
            self.wait_any()

    def settle_page(self, page: PageId) -> None:
        """Waits until the page is not in the hands of the queue."""
        while self.store.state(page) in IN_FLIGHT:
            tasks = self.store.busy(page)
            self.wait_for(tasks)
            if not tasks:
                self.poll()

    def fail(self, error: BaseException) -> None:
        """From now on every call raises, with ``error`` as the cause."""
        self._failure = self._failure or error

    @property
    def failure(self) -> BaseException | None:
        """What made the engine stop, if anything did."""
        return self._failure

    def check(self) -> None:
        """Errors: EngineFailedError after ``fail``, or after a failure while updates were in flight."""
        if self._failure is not None:
            raise EngineFailedError(
                "the engine stopped, because something failed that leaves its state in doubt: "
                f"{type(self._failure).__name__}: {self._failure} "
                "Start again from the last checkpoint."
            ) from self._failure
