"""CLIP's tokenizer from `vocab.json` and `merges.txt`, for folders without `tokenizer.json`.

transformers up to version 4 writes such folders for its CLIPTokenizer, and so does diffusers' conversion script.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from sdonnx.errors import FolderError

__all__ = ["MERGES", "VOCABULARY", "clip_tokenizer"]

VOCABULARY, MERGES = "vocab.json", "merges.txt"

# Radford et al., arXiv:2103.00020, section 2.4; the expression is from OpenAI's simple_tokenizer.py.
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_START, _END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(folder: Path, names: Mapping[str, str]) -> Tokenizer:
    """Return CLIP's tokenizer: lower case, byte-level BPE, a suffix at the end of each word.

    Source: `CLIPTokenizer.__init__` of transformers.

    Args:
        folder: folder with `vocab.json` and `merges.txt`.
        names: special tokens of the folder by name: unk_token, bos_token and eos_token.

    Raises:
        FolderError: a file is missing or broken, or a special token is not in the vocabulary.
    """
    vocabulary, merges = folder / VOCABULARY, folder / MERGES
    try:
        model = models.BPE.from_file(
            str(vocabulary),
            str(merges),
            unk_token=names.get("unk_token", _END),
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            fuse_unk=False,
        )
    except Exception as error:  # the library raises plain Exception
        raise FolderError(
            f"{VOCABULARY} and {MERGES} in {folder} cannot be read ({error})",
            "CLIP's vocabulary and merges",
            "export the pipeline again",
        ) from None
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    start, end = names.get("bos_token", _START), names.get("eos_token", _END)
    numbers = tokenizer.get_vocab()
    for token in (start, end):
        if token not in numbers:
            raise FolderError(
                f"{vocabulary} lacks {token!r}", "the special tokens of the folder", "export the pipeline again"
            )
    tokenizer.post_processor = processors.RobertaProcessing(
        (end, numbers[end]), (start, numbers[start]), trim_offsets=False, add_prefix_space=False
    )
    return tokenizer
