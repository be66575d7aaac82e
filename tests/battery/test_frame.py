"""The battery's own frame: its output, its files, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.battery import rows
from tests.battery.__main__ import main
from tests.battery.figures import Figures, Scale


def run(scale: Scale) -> Figures:
    """Runs a row that meets its target for even seeds, fails to run on seed 9, and tries nothing on seed 4."""
    if scale.seed == 9:
        raise RuntimeError("nothing works")
    met = scale.seed % 2 == 0
    details, findings = {"half": 0.5, "never": float("inf")}, ["odd"] * (not met)
    return Figures("even", 0 if scale.seed == 4 else scale.count(1000), int(not met), met, details, findings)


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MODULES", {"planted": __name__})
    monkeypatch.setattr("tests.battery.__main__.MODULES", {"planted": __name__})


def battery(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object], str, str]:
    code = main(["--out", str(tmp_path), *words])
    shown = capsys.readouterr()
    line = shown.out.splitlines()[-1]
    assert (tmp_path / "battery.json").read_text() == line + "\n"
    page = (tmp_path / "battery.md").read_text()
    assert "| planted | " in page
    return code, json.loads(line), shown.err, page


def test_met_target_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown, page = battery(tmp_path, capsys, "--seed", "2", "--scale", "0.5", "--rows", "planted")
    assert code == 0
    assert found["met"] is True
    assert found["rows"]["planted"]["cases"] == 500  # type: ignore[index]
    assert found["rows"]["planted"]["details"] == {"half": 0.5, "never": None}  # type: ignore[index]
    assert "planted: met" in shown
    assert "| even | 500 | 0 | yes (sample) |" in page


def test_full_scale_is_no_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, _, page = battery(tmp_path, capsys, "--seed", "2")
    assert "| even | 1,000 | 0 | yes |" in page
    _, _, _, page = battery(tmp_path, capsys, "--seed", "2", "--seconds", "9")
    assert "| yes (sample) |" in page


def test_missed_target_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, shown, page = battery(tmp_path, capsys, "--seed", "3")
    assert code == 1
    assert found["met"] is False
    assert "planted: missed" in shown
    assert "odd" in shown
    assert "| even | 1,000 | 1 | **no** |" in page
    assert "What planted missed:\n\n- odd\n" in page


def test_row_that_tries_nothing_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _, page = battery(tmp_path, capsys, "--seed", "4")
    assert code == 1
    assert found["rows"]["planted"]["met"] is False  # type: ignore[index]
    assert "- nothing was tried\n" in page


def test_row_that_cannot_run_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _, _ = battery(tmp_path, capsys, "--seed", "9")
    assert code == 1
    assert "nothing works" in found["rows"]["planted"]["findings"][0]  # type: ignore[index]
    assert "nothing works" in (tmp_path / "battery" / "planted.traceback").read_text()


@pytest.mark.parametrize("words", [["--rows", "nothing"], ["--rows", ""], ["--scale", "0"], ["--seconds", "nan"]])
def test_invalid_arguments_are_refused(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), *words])
