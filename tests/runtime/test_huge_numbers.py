"""Arguments beyond the range of floats, or too long to be written, are refused in one line like any wrong number."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

from sdonnx.errors import OptionError, SdonnxError
from sdonnx.runtime.inputs.argument_checks import require_multiple, require_number
from sdonnx.runtime.inputs.stable_diffusion_xl_inputs import SizeConditions
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

HUGE = [10**30, 10**400, -(10**400)]
UNWRITABLE = 10**5000  # Python refuses to write so many digits

CALL: dict[str, Any] = {"prompt": "a fox", "height": 32, "width": 32, "num_inference_steps": 1}
# They turn a feature on or off, by the truth of any value.
SWITCHES = {"return_dict", "use_resolution_binning", "clean_caption", "guess_mode", "requires_aesthetics_score"}


@pytest.mark.parametrize("value", [*HUGE, UNWRITABLE, 1j, np.complex64(1), True, "1", math.nan, -math.inf], ids=type)
def test_a_value_that_is_no_finite_number(value: Any) -> None:
    for minimum, maximum in ((-math.inf, math.inf), (0, 1)):
        if value == 10**30 and maximum == math.inf:
            require_number("weight", value)
            continue
        with pytest.raises(OptionError, match="weight is ") as caught:
            require_number("weight", value, minimum, maximum)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [10**4400 + 1, -UNWRITABLE], ids=["odd", "negative"])
def test_a_size_that_cannot_be_written(value: int) -> None:
    with pytest.raises(OptionError, match="height is a huge integer"):
        require_multiple("height", value, 8)


def _parameters() -> list[str]:
    parameters = inspect.signature(OrtDiffusionPipeline.__call__).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self"]


@pytest.mark.parametrize("name", sorted(set(_parameters()) - SWITCHES))
@pytest.mark.parametrize("value", HUGE[1:], ids=["large", "negative"])
def test_every_argument_of_a_call(name: str, value: int, ours: OrtDiffusionPipeline) -> None:
    for given in (value, [value], [value, 1]):
        with pytest.raises(SdonnxError) as caught:
            ours(**{**CALL, name: given})
        assert len(str(caught.value).splitlines()) == 1


def test_weights_of_adapters(ours: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `set_adapters` reads them; the pipeline has no adapter, so none has to be loaded."""
    monkeypatch.setattr(ours, "_require_loaded", lambda names: None)
    for weights in (10**400, [10**400], {"unet": -(10**400)}):
        with pytest.raises(OptionError, match=r"the weight of the adapter a is -?10{400}; expected a finite number"):
            ours.set_adapters(["a"], weights)


@pytest.mark.parametrize("value", [10**400, 10**30], ids=["large", "smaller"])
def test_sizes_of_conditioning(value: int) -> None:
    for name in ("original_size", "target_size", "crops_coords_top_left"):
        sizes: Any = {name: (8, value)}
        with pytest.raises(OptionError, match=f"{name} is "):
            SizeConditions(**sizes).time_ids(8, 8, scored=False, from_image=False)
