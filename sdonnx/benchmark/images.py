"""The images of a comparison, as files and on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.benchmark.results import Comparison
from sdonnx.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_images", "save_images"]

_CELLS = 48  # of a terminal, in which an image is shown


def save_images(comparison: Comparison, path: Path) -> None:
    """Write each image beside `path`, the engine and the size added to its name.

    Raises:
        OutputError: one cannot be written.
    """
    for (rival, workload), image in comparison.images.items():
        engine = rival.replace(" ", "-").replace(":", "-")
        name = f"{path.stem}-{engine}-{workload.height}x{workload.width}-b{workload.batch_size}{path.suffix or '.png'}"
        try:
            image.save(path.with_name(name))
        except (OSError, ValueError) as error:
            raise OutputError(
                f"writing {path.with_name(name)} failed ({error})",
                "a place for images, and a name such as x.png",
                "choose another with --output_image",
            ) from error


def print_images(comparison: Comparison, out: Console) -> None:
    """Show the images in half blocks."""
    from rich_pixels import Pixels

    for (rival, workload), image in comparison.images.items():
        out.print(f"{rival}, {workload.title}", markup=False)
        out.print(Pixels.from_image(image, resize=(_CELLS, max(1, _CELLS * image.height // image.width))))
