"""Fuzz a reader of folders with atheris: `python fuzz/fuzz_reader.py READER FOLDER [FILE] [libFuzzer's options]`.

FOLDER is a valid folder of the kind that the reader reads. The reader opens a copy, in which the fuzzer changes FILE.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import atheris

with atheris.instrument_imports(include=["sdonnx"]):
    from support.readers import READERS

    from sdonnx.errors import SdonnxError


def main(name: str, folder: str, *options: str) -> None:
    """Fuzz until the process is stopped or an exception other than SdonnxError is raised."""
    reader = READERS[name]
    files = [option for option in options if not option.startswith("-")]
    file = files[0] if files else reader.files[0]
    work = Path(tempfile.mkdtemp()) / "folder"
    shutil.copytree(folder, work)
    corpus = work.parent / "corpus"
    corpus.mkdir()
    shutil.copyfile(work / file, corpus / "valid")
    warnings.simplefilter("ignore")

    def once(data: bytes) -> None:
        (work / file).write_bytes(data)
        with contextlib.suppress(SdonnxError):
            reader.read(work)

    largest = 2 * (work / file).stat().st_size
    flags = [option for option in options if option.startswith("-")]
    atheris.Setup([sys.argv[0], f"-max_len={largest}", *flags, str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
