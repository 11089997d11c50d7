"""The run-time avoids faulty backends and warns about faulty kernels."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor import FAULT, FOUND

from sdonnx.doctor import first_use
from sdonnx.doctor.check_kernels import ATTENTION
from sdonnx.runtime.device import kernel_workarounds as runtime_kernels


def test_sessions_avoid_a_faulty_backend() -> None:
    options = runtime_kernels.kernel_options
    assert options(FOUND, {}) == {"sdpa_kernel": "26"}
    assert options(FOUND, {"sdpa_kernel": "8", "a": "b"}) == {"sdpa_kernel": "8", "a": "b"}
    assert options(replace(FOUND, sdpa_kernel=0), {"a": "b"}) == {"a": "b"}
    assert options(None, {}) == {}


def test_warns_only_about_operators_of_the_folder() -> None:
    report = {"components": {"unet": {"operators_after": {"BiasAdd": 16}}, "vae": {"operators_after": {"Conv": 3}}}}
    assert "BiasAdd" in runtime_kernels.warning_of(FOUND, report)
    for other in ({}, {"components": None}, {"components": {"unet": {"operators_after": {"Conv": 3}}}}):
        assert runtime_kernels.warning_of(FOUND, other) == ""
    assert runtime_kernels.warning_of(None, report) == ""


@pytest.mark.parametrize("is_faulty", [False, True])
def test_the_pipeline_uses_the_verdict(is_faulty: bool, tiny_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdonnx.runtime import pipeline

    operators = json.loads((tiny_cpu / "sdonnx.json").read_text())["components"]["unet"]["operators_after"]
    assert ATTENTION in operators
    faults = (replace(FAULT, operator=ATTENTION),) if is_faulty else ()
    monkeypatch.setattr(pipeline, "verdict_on", lambda device: replace(FOUND, faults=faults))
    given: list[Mapping[str, str]] = []

    class RefusedError(Exception):
        pass

    def graph_set(folder: Any, family: Any, device: Any, settings: Any, low_memory: bool) -> Any:
        given.append(settings.provider_options)
        raise RefusedError  # the CPU provider has no such option

    monkeypatch.setattr(pipeline, "GraphSet", graph_set)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RefusedError):
            pipeline.OrtDiffusionPipeline.from_pretrained(tiny_cpu, provider_options={"a": "b"})
    assert given == [{"sdpa_kernel": "26", "a": "b"}]
    assert [warning.category for warning in caught] == [first_use.KernelWarning] * is_faulty
