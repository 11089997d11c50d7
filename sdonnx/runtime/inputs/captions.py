"""Cleaning of captions, as in the training data of PixArt.

Source: diffusers' PixArtAlphaPipeline._text_preprocessing and _clean_caption, from DeepFloyd IF: captions of LAION
without addresses, markup, codes and advertising.
"""

from __future__ import annotations

import html
import importlib.util
import re
import urllib.parse

from sdonnx.errors import OptionError, PromptError
from sdonnx.runtime.inputs.prompt_tokenizer import require_text

__all__ = ["can_clean", "prepared", "require_packages"]

_PACKAGES = {"bs4": "beautifulsoup4", "ftfy": "ftfy"}

_SITES = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@)"
_DASHES = (
    r"[\u002D\u058A\u05BE\u1400\u1806\u2010-\u2015\u2E17\u2E1A\u2E3A\u2E3B\u2E40\u301C\u3030\u30A0\uFE31\uFE32"
    r"\uFE58\uFE63\uFF0D]+"
)
_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"

Table = tuple[tuple[re.Pattern[str], str], ...]


def _table(*rows: tuple[str, str]) -> Table:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rows)


_BEFORE_MARKUP = _table(
    ("<person>", "person"),
    (rf"\b((?:https?:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_SITES}))", ""),
    (rf"\b((?:www:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_SITES}))", ""),
)
_BEFORE_REPAIR = _table(
    (r"@[\w\d]+\b", ""),  # user names
    (r"[\u31c0-\u31ef\u31f0-\u31ff\u3200-\u32ff\u3300-\u33ff\u3400-\u4dbf\u4dc0-\u4dff\u4e00-\u9fff]+", ""),
    (_DASHES, "-"),
    (r"[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    (r"[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"[\S]+\.(?:{_FILES})", ""),
    (r"[\"\']{2,}", '"'),
    (r"[\.]{2,}", " "),
    (r"[#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~\)\(\]\[\}\{\|\\\/\*]{1,}", " "),
    (r"\s+\.\s+", " "),
)
_JOINED = re.compile(r"(?:\-|\_)")  # this-is-my-cat
_AFTER_REPAIR = _table(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # article numbers
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[x\u0445\u00d7]\d+\.?\d*\b", ""),  # sizes
    (r"\b\s+\:\s+", ": "),
    (r"(\D[,\./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"\']([\w\W]+)[\"\']$", r"\1"),
    (r"^[\'\_,\-\:;]", ""),
    (r"[\'\_,\-\:\-\+]$", ""),
    (r"^\.\S+$", ""),
)


def can_clean() -> bool:
    """Return whether the packages that clean captions are installed."""
    return all(importlib.util.find_spec(module) is not None for module in _PACKAGES)


def require_packages() -> None:
    """Raise OptionError if a package that cleans captions is not installed."""
    if not can_clean():
        names = _PACKAGES.values()
        raise OptionError("clean_caption without its packages", " and ".join(names), f"pip install {' '.join(names)}")


def prepared(caption: str, clean: bool | None = None) -> str:
    """Return a caption for the text encoder: cleaned, or only stripped and in lower case.

    Args:
        caption: the text.
        clean: whether to clean it; None to clean it if the packages are installed, as in diffusers.

    Raises:
        OptionError: `clean` is True, and a package is missing.
        PromptError: the caption is not text, or contains markup that cannot be parsed.
    """
    require_text(caption)
    if clean is None:
        clean = can_clean()
    if not clean:
        return caption.lower().strip()
    require_packages()
    return _cleaned(_cleaned(caption))  # twice, as in diffusers: the first pass may uncover more to clean


def _cleaned(caption: str) -> str:
    import ftfy
    from bs4 import BeautifulSoup
    from bs4.exceptions import ParserRejectedMarkup

    text = _replaced(_BEFORE_MARKUP, urllib.parse.unquote_plus(caption).strip().lower())
    try:
        text = BeautifulSoup(text, features="html.parser").text
    except ParserRejectedMarkup as error:
        raise PromptError(
            f"the caption {caption!r} contains markup that cannot be parsed",
            "text",
            "correct it, or pass clean_caption=False",
        ) from error
    text = _replaced(_BEFORE_REPAIR, text)
    if len(_JOINED.findall(text)) > 3:
        text = _JOINED.sub(" ", text)
    return _replaced(_AFTER_REPAIR, html.unescape(html.unescape(ftfy.fix_text(text)))).strip()


def _replaced(table: Table, text: str) -> str:
    for pattern, replacement in table:
        text = pattern.sub(replacement, text)
    return text
