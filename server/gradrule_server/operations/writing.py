"""Where lines are written: by a thread of their own, so that a slow disk or a pipe nobody reads stops no caller."""

from __future__ import annotations

import io
import logging
import os
import threading
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import TextIO

# What waits to be written; a line takes a few KiB at most. A disk that stands still for seconds costs no line.
_CAPACITY = 10_000


class LeftOut:
    """Counts lines that were not written, from any thread."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        """One more."""
        with self._lock:
            self._count += 1

    def take(self) -> int:
        """How many there were since this was asked last."""
        with self._lock:
            count, self._count = self._count, 0
        return count


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes each record as a line, past Python's buffers and outside of the handler's lock.

    Both are locked while something is written, and a process cannot end while they are.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.left_out = LeftOut()
        """Lines that could not be written."""
        self.is_failing = False
        """The last line could not be written."""

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
        """Writes a line; whatever that raises counts as a line that was left out."""
        write_line(self.stream, line)

    def handleError(self, record: logging.LogRecord) -> None:
        """Counts it: there is nowhere else to tell it, and it must not cost anybody an answer."""
        self.left_out.add()


def write_line(stream: TextIO, line: str) -> None:
    """Writes a line to a stream's file, or to the stream where it has none."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        stream.write(line + "\n")
        return
    data = memoryview(f"{line}\n".encode(stream.encoding or "utf-8", "backslashreplace"))
    while data:
        data = data[os.write(descriptor, data) :]


class Background:
    """Takes the writing of a logger's `LineHandler` to a thread of its own, once it is started.

    Lines are made by whoever logs, for they name the request under way, and wait in a queue; what finds no room in it
    is counted. Without such a handler nothing changes.
    """

    def __init__(self, logger: logging.Logger, capacity: int = _CAPACITY) -> None:
        self._logger = logger
        self._capacity = capacity
        self._queue: Queue[logging.LogRecord] = Queue(capacity)
        self._target = next((handler for handler in logger.handlers if isinstance(handler, LineHandler)), None)

    def start(self) -> None:
        """From now on nobody who logs waits. The thread ends with the process."""
        target = self._target
        if target is None:
            return
        queued = _Queued(self._queue, target)
        self._logger.handlers[:] = [queued if handler is target else handler for handler in self._logger.handlers]
        target.setFormatter(None)
        QueueListener(self._queue, target).start()

    @property
    def may_tell(self) -> bool:
        """What is told now is written, as far as one can know."""
        is_failing = self._target is not None and self._target.is_failing
        return not is_failing and self._queue.qsize() <= self._capacity // 2

    def take_left_out(self) -> int:
        """How many lines were not written since this was asked last: nobody read them, or the disk was full."""
        return 0 if self._target is None else self._target.left_out.take()

    def drain(self, seconds: float) -> bool:
        """Waits until all is written, for so long at most; whether it is. Not called on the event loop."""
        done = self._queue.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)


class _Queued(QueueHandler):
    """Makes lines as the target would, and hands them on while there is room."""

    def __init__(self, queue: Queue[logging.LogRecord], target: LineHandler) -> None:
        super().__init__(queue)
        self._left_out = target.left_out
        self.setFormatter(target.formatter)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return logging.makeLogRecord({"msg": self.format(record)})

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            super().enqueue(record)
        except Full:
            self._left_out.add()

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be made is one that is left out."""
        self._left_out.add()
