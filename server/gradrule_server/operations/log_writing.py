"""Writes lines of logs on a separate thread, and limits the rate of lines that clients cause.

A slow disk or an unread pipe must not block requests, and no client may fill a disk.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import TextIO

# Lines that may wait to be written, of a few KiB each at most: enough for a disk that stalls for some seconds.
_CAPACITY = 10_000
_NEWLINE = ord("\n")
# Keys that a rate limiter remembers.
_MAX_KEYS = 1000


class DroppedCount:
    """Counts lines that were not written, from any thread."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        """Counts a line."""
        with self._lock:
            self._count += 1

    def take(self) -> int:
        """Returns how many lines were counted since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes each record as a line, without Python's buffers and the handler's lock.

    Buffers and handler are locked during a write, and a process cannot exit while they are locked.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.dropped = DroppedCount()
        """Counts lines that could not be written."""
        self.is_failing = False
        """Whether the last line could not be written."""
        self.is_torn = False
        """Whether the stream ends within a line, because the rest could not be written."""

    def handle(self, record: logging.LogRecord) -> bool:
        is_wanted = bool(self.filter(record))
        if is_wanted:
            self.emit(record)
        return is_wanted

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(self.format(record))
        except Exception:
            self.is_failing = True
            self.handleError(record)
        else:
            self.is_failing = False

    def write(self, line: str) -> None:
        """Writes a line; `emit` counts the line as dropped if this raises."""
        try:
            descriptor = self.stream.fileno()
        except io.UnsupportedOperation:
            self.stream.write(line + "\n")
            return
        # The end of a line that was dropped must not be the start of this one.
        text = f"\n{line}\n" if self.is_torn else f"{line}\n"
        data = memoryview(text.encode(self.stream.encoding or "utf-8", "backslashreplace"))
        while data:
            count = os.write(descriptor, data)
            self.is_torn = count < len(data) and data[count - 1] != _NEWLINE
            data = data[count:]

    def handleError(self, record: logging.LogRecord) -> None:
        """Counts the line as dropped: the failure cannot be logged, and must not fail a request."""
        self.dropped.add()


class BackgroundWriter:
    """Moves the writing of a logger's `LineHandler` to a separate thread.

    The thread that logs formats the line, because the line names its current request, and puts it into a queue; lines
    that do not fit into the queue are counted as dropped. Without a `LineHandler` nothing changes.
    """

    def __init__(self, logger: logging.Logger, capacity: int = _CAPACITY) -> None:
        self._logger = logger
        self._capacity = capacity
        self._queue: Queue[logging.LogRecord] = Queue(capacity)
        self._target = next((handler for handler in logger.handlers if isinstance(handler, LineHandler)), None)

    def start(self) -> None:
        """Starts the thread, which ends with the process. From now on logging does not block."""
        target = self._target
        if target is None:
            return
        queued = _FormattingQueueHandler(self._queue, target)
        self._logger.handlers[:] = [queued if handler is target else handler for handler in self._logger.handlers]
        target.setFormatter(None)
        QueueListener(self._queue, target).start()

    @property
    def can_write(self) -> bool:
        """Whether a line that is logged now will probably be written."""
        is_failing = self._target is not None and self._target.is_failing
        return not is_failing and self._queue.qsize() <= self._capacity // 2

    def take_dropped(self) -> int:
        """Returns how many lines could not be written since the last call."""
        return 0 if self._target is None else self._target.dropped.take()

    def drain(self, seconds: float) -> bool:
        """Waits until all lines are written, at most for this time; returns whether they are. Blocks."""
        done = self._queue.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)


class _FormattingQueueHandler(QueueHandler):
    """Formats lines as the target would, and puts them into the queue unless it is full."""

    def __init__(self, queue: Queue[logging.LogRecord], target: LineHandler) -> None:
        super().__init__(queue)
        self._dropped = target.dropped
        self.setFormatter(target.formatter)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return logging.makeLogRecord({"msg": self.format(record)})

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            super().enqueue(record)
        except Full:
            self._dropped.add()

    def handleError(self, record: logging.LogRecord) -> None:
        """Counts a line that could not be formatted as dropped."""
        self._dropped.add()


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float
    dropped: int = 0


class RateLimiter:
    """Limits lines by key, a tenant for example, with one token bucket for each; remembers at most 1,000 keys.

    Args:
        per_second: Lines per second in the long run.
        burst: Lines at once.
        clock: Returns the time in seconds.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._dropped_of_removed_keys = 0

    def allow(self, key: str = "") -> bool:
        """Returns whether a line may be written now; counts it as dropped if not."""
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _MAX_KEYS:
                _, removed = self._buckets.popitem(last=False)
                self._dropped_of_removed_keys += removed.dropped
            bucket = self._buckets[key] = _Bucket(self._burst, now)
        else:
            self._buckets.move_to_end(key)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.filled_at) * self._per_second)
        bucket.filled_at = now
        if bucket.tokens < 1:
            bucket.dropped += 1
            return False
        bucket.tokens -= 1
        return True

    def take_dropped(self) -> int:
        """Returns how many lines were dropped since the last call."""
        dropped = self._dropped_of_removed_keys + sum(bucket.dropped for bucket in self._buckets.values())
        self._dropped_of_removed_keys = 0
        for bucket in self._buckets.values():
            bucket.dropped = 0
        return dropped
