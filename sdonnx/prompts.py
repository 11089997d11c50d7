"""The prompts that are drawn where the user gives none, and those that a file holds."""

from __future__ import annotations

from pathlib import Path

from sdonnx.errors import OptionError

__all__ = ["PROMPTS", "read_prompts", "usual_prompts"]

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
"""What is drawn. CLIP's prompts are all padded to one length, captions to 32, 64 or more tokens; the first to 32."""

_CAPTION = (
    "a wide view of an old town by the sea at night, painted in oil: on the left a stone castle with a red light, in "
    "front of it three small boats on the water, behind them a row of houses with blue doors on a green hill, above "
    "all a sky of pink clouds with a few birds, and on the road an old woman with a white dog"
)


def usual_prompts(captions: bool) -> tuple[str, ...]:
    """Return what a folder is tried with where nothing else is asked for.

    Args:
        captions: whether its pipeline reads captions. From 65 tokens on other graphs draw them: one is of so many.
    """
    return (PROMPTS[0], _CAPTION) if captions else PROMPTS[:2]


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts of a text file, a prompt a line; empty lines are left out.

    Raises:
        OptionError: the file cannot be read, or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read ({error})", "a text file, a prompt a line", "give one") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise OptionError(f"{path} has no line with a prompt", "one at least", "write some")
    return prompts
