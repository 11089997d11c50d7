"""Write the images of a comparison to files, or show them on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.benchmark.results import Comparison
from sdonnx.benchmark.shown_names import shown_name
from sdonnx.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_images", "save_images"]

_WIDTH = 48  # terminal columns of an image


def save_images(comparison: Comparison, path: Path) -> list[Path]:
    """Write each image to the folder of `path`, with the engine and the size appended to the name; return the paths.

    Raises:
        OutputError: an image cannot be written.
    """
    written = []
    for (rival, workload), image in comparison.images.items():
        engine = rival.replace(" ", "-").replace(":", "-")
        name = f"{path.stem}-{engine}-{workload.height}x{workload.width}-b{workload.batch_size}{path.suffix or '.png'}"
        try:
            image.save(path.with_name(name))
        except (OSError, ValueError) as error:
            raise OutputError(
                f"writing {path.with_name(name)} failed ({error})",
                "a writable folder, and a name such as x.png",
                "choose another name with --output_image",
            ) from error
        written.append(path.with_name(name))
    return written


def print_images(comparison: Comparison, out: Console) -> None:
    """Print the images with half-block characters."""
    from rich_pixels import Pixels

    for (rival, workload), image in comparison.images.items():
        out.print(f"{shown_name(rival)}, {workload.title}", markup=False)
        out.print(Pixels.from_image(image, resize=(_WIDTH, max(1, _WIDTH * image.height // image.width))))
