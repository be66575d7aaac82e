"""Shows the progress of training: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gradrule.cli.output import Screen

_LINES = 5

Report = Callable[[int, float, float], None]


@contextlib.contextmanager
def shown(screen: Screen, title: str, total: int) -> Iterator[Report]:
    """Yields the function to call after each step, with the number of steps, the loss and the latest test accuracy."""
    if not screen.is_terminal:

        def line(done: int, loss: float, accuracy: float) -> None:
            if done == total or done % max(total // _LINES, 1) == 0:
                screen.print(f"{title}: step {done}/{total}, loss {loss:.3f}, test accuracy {accuracy:.3f}")

        yield line
        return
    # Bars need rich.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    assert isinstance(screen, Console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    detail = TextColumn("loss {task.fields[loss]:.3f}  test accuracy {task.fields[accuracy]:.3f}")
    with Progress(*columns, detail, console=screen) as bars:
        task = bars.add_task(title, total=total, loss=float("nan"), accuracy=float("nan"))

        def bar(done: int, loss: float, accuracy: float) -> None:
            bars.update(task, completed=done, loss=loss, accuracy=accuracy)

        yield bar
