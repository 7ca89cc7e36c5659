"""An event loop in virtual time whose interleavings follow a seed.

Sleeping costs nothing, the same seed gives the same run, other seeds give other orders, and a program in which everybody waits for
somebody ends with a `Deadlock` that names the waiting tasks.  Threads do not run in virtual time: code that has a threadless form
looks at the loop's attribute ``threadless`` (`hicache_actors.runtime.Workers` does).
"""

from __future__ import annotations

import asyncio
import random
import selectors
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from hicache_actors.errors import UsageError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_DEFER_PROBABILITY = 0.2


class Deadlock(RuntimeError):
    """No task can run, no timer is set: everybody waits.  The message names who waits where."""


class _InstantSelector(selectors.SelectSelector):
    """Never blocks: with nothing ready it jumps the loop's clock to the next timer."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                self.loop._report_deadlock()
            self.loop._now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``seed`` None: plain FIFO order.  Else, in each turn of the loop, ready callbacks are shuffled, and with ``defer`` each is
    put off to the next turn with probability 0.2 (shuffling alone never delays a callback by a turn)."""

    threadless = True

    def __init__(self, seed: int | None = None, *, defer: bool = True) -> None:
        selector = _InstantSelector()
        selector.loop = self
        self.seed = seed
        self._now_s = 0.0
        self._random = None if seed is None else random.Random(seed)
        self._defer = defer
        self._task_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._tasks_made = 0
        super().__init__(selector)

    def time(self) -> float:
        return self._now_s

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **kwargs)
        self._tasks_made += 1
        self._task_numbers[task] = self._tasks_made
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        if getattr(executor, "threadless", False):  # lent by `Workers`, which run on this loop here
            return super().run_in_executor(executor, func, *args)
        raise UsageError("threads do not run in virtual time: use Workers, or a real loop")

    def _run_once(self) -> None:
        if self._random is None:
            super()._run_once()  # type: ignore[misc]
            return
        ready = self._ready  # type: ignore[attr-defined]
        deferred: list[asyncio.Handle] = []
        if len(ready) > 1:
            handles = self._in_stable_order(ready)
            ready.clear()
            self._random.shuffle(handles)
            for handle in handles:
                # one always stays: with nothing ready the clock would jump while work waits
                if self._defer and ready and self._random.random() < _DEFER_PROBABILITY:
                    deferred.append(handle)
                else:
                    ready.append(handle)
        try:
            super()._run_once()  # type: ignore[misc]
        finally:
            ready.extend(deferred)

    def _in_stable_order(self, ready: Any) -> list[asyncio.Handle]:
        """Tasks that were woken together out of a set come in the order of their addresses; order them by their creation, else
        one seed would not give one run."""
        handles = list(ready)
        places, tasks = [], []
        for place, handle in enumerate(handles):
            task = getattr(handle._callback, "__self__", None)
            if isinstance(task, asyncio.Task):
                places.append(place)
                tasks.append((self._task_numbers.get(task, 0), place, handle))
        for place, (_, _, handle) in zip(places, sorted(tasks, key=lambda entry: entry[:2]), strict=True):
            handles[place] = handle
        return handles

    def _report_deadlock(self) -> NoReturn:
        waiting = sorted(asyncio.all_tasks(self), key=lambda task: self._task_numbers.get(task, 0))
        places = "\n".join(f"  {task.get_name()} at {_innermost(task)}" for task in waiting)
        raise Deadlock(
            f"at {self._now_s:.3f} virtual seconds nothing is ready and no timer is set (seed {self.seed}); "
            f"a thread cannot wake a virtual loop. Waiting:\n{places}"
        )


def virtual_backend(seed: int | None = None, *, defer: bool = True) -> tuple[str, dict[str, Any]]:
    """A value for pytest's fixture ``anyio_backend``, and for ``anyio.run(main, backend=v[0], backend_options=v[1])``."""
    return "asyncio", {"loop_factory": partial(VirtualLoop, seed, defer=defer)}


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], seed: int | None = None, *, defer: bool = True) -> T:
    """Run ``main()`` on a fresh `VirtualLoop` to its end.  Raises what it raises, or `Deadlock`."""
    with asyncio.Runner(loop_factory=partial(VirtualLoop, seed, defer=defer)) as runner:
        return runner.run(main())


def _innermost(task: asyncio.Task[Any]) -> str:
    """Where the coroutine chain of a waiting task stands, outermost of our callers last seen first."""
    coroutine: Any = task.get_coro()
    place = repr(coroutine)
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"
        coroutine = getattr(coroutine, "cr_await", None)
    return place
