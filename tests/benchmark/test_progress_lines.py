"""Progress of a comparison: in a log and on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from sdonnx.benchmark.progress_lines import INTERVAL_S, ProgressLines


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_three_engines(out: Console, seconds_per_run: float) -> None:
    """Report the messages of three engines with two rounds of five runs."""
    clock = Clock()
    with ProgressLines(out, clock) as show:
        show("no diffusers folder was given: images are not compared", "")
        for number in (1, 2):
            for engine in ("sdonnx", "torch eager", "torch.compile"):
                title = f"{engine}, round {number} of 2"
                for detail in ("started", "loaded in 1.00 s", *(f"run {run + 1} of 5: 0.300 s" for run in range(5))):
                    show(title, detail)
                    clock.now += seconds_per_run


def printed(seconds_per_run: float) -> list[str]:
    text = io.StringIO()
    run_three_engines(Console(file=text, width=100), seconds_per_run)
    return text.getvalue().splitlines()


def test_a_log_has_a_line_for_each_round() -> None:
    assert printed(0.3) == [
        "no diffusers folder was given: images are not compared",
        *(
            f"{engine}, round {number} of 2: started"
            for number in (1, 2)
            for engine in ("sdonnx", "torch eager", "torch.compile")
        ),
    ]


def test_a_log_of_slow_runs_has_a_line_now_and_then() -> None:
    lines = printed(INTERVAL_S / 2)
    assert lines[1:5] == [
        "sdonnx, round 1 of 2: started",
        "sdonnx, round 1 of 2: run 1 of 5: 0.300 s",
        "sdonnx, round 1 of 2: run 3 of 5: 0.300 s",
        "sdonnx, round 1 of 2: run 5 of 5: 0.300 s",
    ]
    assert len(lines) == 1 + 6 * 4


def test_a_terminal_shows_every_run_in_place() -> None:
    text = io.StringIO()
    run_three_engines(Console(file=text, force_terminal=True, width=100), 0.3)
    assert text.getvalue().count("run 3 of 5: 0.300 s") == 6
    # Apart from the lines of the log, everything is erased again.
    assert text.getvalue().count("\n") <= 1 + 6 + 6
    assert "\x1b[2K" in text.getvalue()
