"""Waiting for a check in the background: it is started after an image, and its verdict is acted on once."""

from __future__ import annotations

from dataclasses import replace

from support.doctor import FOUND, AwaitedCheck

from sdonnx.doctor.background_check import BackgroundCheck
from sdonnx.doctor.verdict import Verdict
from sdonnx.runtime.device.awaits_verdict import AwaitsVerdict

OWN = replace(FOUND, key={"kernel_sources": "c0ffee"})


class Part(AwaitsVerdict):
    """Notes the verdicts that it follows."""

    def __init__(self, check: BackgroundCheck | None) -> None:
        super().__init__()
        self._awaited = check
        self.followed: list[Verdict] = []

    def _verdict_of(self, check: BackgroundCheck) -> Verdict | None:
        return check.own_verdict

    def _follow(self, verdict: Verdict) -> list[str]:
        self.followed.append(verdict)
        assert not self.has_news
        return ["a warning"]


def test_known_verdict_is_not_awaited() -> None:
    part = Part(None)
    part.start()
    assert (part.has_news, part.update(), part.followed) == (False, [], [])


def test_verdict_is_followed_once() -> None:
    check = AwaitedCheck()
    part, other = Part(check), Part(check)
    assert (check.starts, part.has_news, part.update()) == (0, False, [])
    part.start()
    part.start()
    assert (check.starts, part.has_news, part.update()) == (2, False, [])  # the check itself runs once
    check.end(FOUND, OWN)
    assert (part.has_news, part.update(), part.followed) == (True, ["a warning"], [OWN])
    assert (part.has_news, part.update(), part.followed) == (False, [], [OWN])
    part.start()
    assert check.starts == 2
    assert (other.has_news, other.update()) == (True, ["a warning"])


def test_check_without_the_verdict_is_no_news() -> None:
    """A GPU that cannot use our own kernels has no verdict on them."""
    check = AwaitedCheck()
    part = Part(check)
    check.end(FOUND, None)
    assert (part.has_news, part.update(), part.followed) == (False, [], [])
