"""Gives the asynchronous client the interface of the synchronous one, so that one suite tests both."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import gradrule as gr


class LoopThread:
    """Runs an event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `function` on the loop and waits for its result: a coroutine or an asynchronous iterator."""

        async def call() -> Any:
            result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            if hasattr(result, "__aiter__"):
                result = [item async for item in result]
            return result

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def close(self) -> None:
        """Ends the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingClient:
    """Waits for each call of an asynchronous client or program."""

    def __init__(self, target: Any, loop: LoopThread) -> None:
        self.target = target
        self._loop = loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(self._loop.run(self.target, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._wrapped(self._loop.run(value, *args, **kwargs))

        return call

    def __enter__(self) -> BlockingClient:
        self._loop.run(self.target.__aenter__)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.run(self.target.__aexit__, *exc)

    def _wrapped(self, value: Any) -> Any:
        methods = (getattr(type(value), name, None) for name in ("evaluate", "vjp"))
        asynchronous = any(inspect.iscoroutinefunction(method) for method in methods)
        return BlockingClient(value, self._loop) if asynchronous else value


def connect(target: str, loop: LoopThread, **options: Any) -> Any:
    """Connects an asynchronous client and wraps it."""
    return BlockingClient(loop.run(gr.aio.connect, target, **options), loop)
