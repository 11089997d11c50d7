"""Default prompts, and prompts read from a file."""

from __future__ import annotations

from pathlib import Path

from sdonnx.errors import OptionError

__all__ = ["PROMPTS", "default_prompts", "read_prompts"]

PROMPTS = (
    "a photograph of an old lighthouse in a storm, waves breaking over the rocks",
    "a red fox asleep in fresh snow, oil painting",
    "the inside of a watchmaker's workshop, warm light, highly detailed",
    "a bowl of lemons on a blue tablecloth, still life",
    "a mountain village at dusk seen from above, lights in the windows",
    "portrait of an elderly fisherman in a yellow raincoat, 85 mm photograph",
    "a steam locomotive crossing a stone viaduct in autumn, watercolour",
    "an astronaut tending a garden in a glass dome on the moon, digital art",
    "macro photograph of a dragonfly on a blade of grass, morning dew",
    "a narrow street of bookshops after rain, reflections, film photograph",
)
"""Default prompts. The first has at most 32 tokens of every tokenizer."""

# More than 64 tokens: pipelines with graphs that depend on the prompt's length use others for it.
_LONG_PROMPT = (
    "a wide view of an old town by the sea at night, painted in oil: on the left a stone castle with a red light, in "
    "front of it three small boats on the water, behind them a row of houses with blue doors on a green hill, above "
    "all a sky of pink clouds with a few birds, and on the road an old woman with a white dog"
)


def default_prompts(variable_length: bool) -> tuple[str, ...]:
    """Return the prompts to try a folder with by default.

    Args:
        variable_length: whether the pipeline pads prompts to several lengths, with graphs of their own. If so, one of
            the prompts is long.
    """
    return (PROMPTS[0], _LONG_PROMPT) if variable_length else PROMPTS[:2]


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts in a text file with one prompt per line; empty lines are ignored.

    Raises:
        OptionError: the file cannot be read or contains no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read ({error})", "a text file with one prompt per line") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise OptionError(f"{path} has no line with a prompt", "at least one", "add a line to the file")
    return prompts
