"""Reports the progress of long calls: to a function of the caller, or as bars on a terminal or in a notebook.

Bars are drawn by rich on standard error. All bars of a process share one display, because rich draws one at a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

from gradrule.errors import InvalidParamError, UnsupportedError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Describes how far a task is.

    Attributes:
        task: What is done: `uploading`, `compiling`, `running`, `training` or `drawing rules`.
        done: Units that are done; 0 in the first report.
        total: Units in all; None if that is not known.
        unit: `bytes`, `calls`, `steps` or `rules`; empty for a task without units.
        is_finished: Whether this is the last report of the task. It comes after an error too.
        values: Numbers that belong to the last unit: `loss` in training.
    """

    task: str
    done: int
    total: int | None
    unit: str
    is_finished: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


Progress: TypeAlias = "bool | Callable[[ProgressReport], object] | None"
"""A function that gets each report; True: a bar, if standard error is a terminal or this is a notebook; None: none."""


class Task(Protocol):
    """Types a task whose progress is reported; a context manager that ends it."""

    def advance(self, count: int = 1, **values: float) -> None:
        """Adds finished units and sets the numbers to show."""

    def close(self) -> None:
        """Ends the task. Does nothing the second time."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Silent:
    """A task that reports nothing."""

    def advance(self, count: int = 1, **values: float) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reported(_Silent):
    """A task that sends reports to a function."""

    def __init__(self, send: Callable[[ProgressReport], object], task: str, total: int | None, unit: str) -> None:
        self._send = send
        self._task, self._total, self._unit = task, total, unit
        self._done = 0
        self._values: dict[str, float] = {}
        self._is_closed = False
        self._report()

    def advance(self, count: int = 1, **values: float) -> None:
        self._done += count
        self._values |= values
        self._report()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._report()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The error of the task counts more than one of the function that gets the reports.
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.close()

    def _report(self) -> None:
        report = ProgressReport(self._task, self._done, self._total, self._unit, self._is_closed, dict(self._values))
        self._send(report)


SILENT: Task = _Silent()
"""A task that reports nothing."""


def start(progress: Progress, task: str, total: int | None, unit: str) -> Task:
    """Starts to report a task.

    Args:
        progress: A function, True or None, see `Progress`.
        task: What is done, as in `ProgressReport`.
        total: Units in all; None if that is not known.
        unit: Name of the units, plural.

    Raises:
        InvalidParamError: `progress` is something else.
        UnsupportedError: A bar is wanted and can be shown, but the package that draws it is not installed.
    """
    if progress is None or progress is False:
        return SILENT
    if callable(progress):
        return _Reported(progress, task, total, unit)
    if progress is not True:
        raise InvalidParamError(f"progress is True, False, None or a function, not {progress!r}")
    if not can_show():
        return SILENT
    _require_rich()
    return _Reported(_DISPLAY.add(), task, total, unit)


def can_show() -> bool:
    """Returns whether standard error is a terminal, or this process runs a notebook."""
    return _is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def total_of(items: Any) -> int | None:
    """Returns the length of items that have one."""
    return len(items) if hasattr(items, "__len__") else None


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and getattr(shell, "kernel", None) is not None


def _require_rich() -> None:
    needed = ("rich", "ipywidgets") if _is_notebook() else ("rich",)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extra = "notebook" if _is_notebook() else "cli"
        raise UnsupportedError(
            f"progress bars need {' and '.join(missing)}, which is not installed: pip install 'gradrule[{extra}]'; "
            f"or give a function as progress"
        )


class _Display:
    """Draws the bars of all tasks that run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: RichProgress | None = None
        self._running = 0

    def add(self) -> Callable[[ProgressReport], None]:
        """Returns the function that draws the reports of a new task."""
        bars: RichProgress | None = None
        number: TaskID | None = None

        def draw(report: ProgressReport) -> None:
            nonlocal bars, number
            if bars is None or number is None:
                bars = self._opened()
                number = bars.add_task(report.task, total=report.total, text="")
            is_unknown = report.total is None
            # A bar without a total moves until its task ends.
            total = max(report.done, 1) if is_unknown and report.is_finished else report.total
            done = total if is_unknown and report.is_finished else report.done
            bars.update(number, completed=done, total=total, text=_text(report))
            if report.is_finished:
                self._close_one()

        return draw

    def _opened(self) -> RichProgress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        with self._lock:
            if self._bars is None:
                columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
                times = (TimeElapsedColumn(), TextColumn("<"), TimeRemainingColumn())
                self._bars = Progress(*columns, *times, console=Console(stderr=True))
                self._bars.start()
            self._running += 1
            return self._bars

    def _close_one(self) -> None:
        with self._lock:
            self._running -= 1
            bars = self._bars
            if self._running or bars is None:
                return
            self._bars = None
        bars.stop()


_DISPLAY = _Display()


def _text(report: ProgressReport) -> str:
    if not report.unit:
        return ""
    if report.unit == "bytes":
        counts = [f"{count / 1e6:.1f}" for count in (report.done, report.total) if count is not None]
        text = f"{'/'.join(counts)} MB"
    else:
        text = f"{report.done}{'' if report.total is None else f'/{report.total}'} {report.unit}"
    return ", ".join([text, *(f"{name} {value:.4g}" for name, value in report.values.items())])
