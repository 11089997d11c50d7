"""The tables that `verify` prints: components and images apart, with prompts shortened between words."""

from __future__ import annotations

import io

from rich.console import Console
from support.verifying import PROMPTS, verification

from sdonnx.cli.verify import components_table, images_table


def printed(table: object, width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue().splitlines()


def test_images_are_not_among_the_components() -> None:
    lines = printed(components_table(verification()[0]), 100)
    assert lines[0].strip() == "Components"
    assert [line.split("│")[1].strip() for line in lines[4:7]] == ["text_encoder", "unet", "vae_decoder"]
    assert not any("lighthouse" in line for line in lines)


def test_prompts_are_shortened_between_words() -> None:
    lines = printed(images_table(verification(passing=False)[0]), 120)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[4:6]]
    assert [cell[1:] for cell in cells] == [["0", "identical", "float16", "0.9900"], ["0", "9.2", "float16", "0.9900"]]
    for (shown, *_), prompt in zip(cells, PROMPTS, strict=True):
        start = shown.removesuffix(" …")
        assert len(shown) <= 60
        assert shown != start
        assert prompt.startswith(start + " ")


def test_tables_fit_a_narrow_terminal() -> None:
    for line in printed(images_table(verification()[0]), 72):
        assert len(line) <= 72
