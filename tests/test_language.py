"""scripts/check_language.py counts each of its words wherever prose is, and fails where they are too many."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import load_script

SCRIPT = load_script("check_language")
WORDS = [(entry, word) for entry in SCRIPT.LIMITS for word in entry.split("/")]
FORMS = {
    "module": '"""See {} there."""\n',
    "function": 'def f():\n    """See {} there."""\n',
    "class": 'class C:\n    r"""See {} there."""\n',
    "attribute": 'X = 1\n"""See {} there."""\n',
    "comment": "x = 1  # see {} there\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("entry", "word"), WORDS)
def test_each_word_is_counted_in_each_form(entry: str, word: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    for spelled in (word, word.capitalize()):
        path.write_text(FORMS[form].format(spelled))
        rate = pytest.approx(1000 / (2 + len(word.split())))
        assert SCRIPT.rates([path]) == dict.fromkeys(SCRIPT.LIMITS, 0.0) | {entry: rate}


def test_words_of_code_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('what = "what"\nprint(f"{what} whatever")\n')
    assert SCRIPT.rates([path]) == dict.fromkeys(SCRIPT.LIMITS, 0.0)


def test_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(SCRIPT, "ROOT", tmp_path)
    text = " word" * 1000
    for many, status in ((0, 0), (1, 0), (2, 1)):
        (tmp_path / "a.py").write_text(f'"""A{text}{" what" * many}."""\n')
        assert SCRIPT.main([str(tmp_path)]) == status
    assert "error: 'what': 2.0 per 1,000 words, at most 1.5 allowed" in capsys.readouterr().out
    (tmp_path / "a.py").unlink()
    assert SCRIPT.main([str(tmp_path)]) == SCRIPT.main([str(tmp_path / "nowhere")]) == 1
    assert "error: no Python file in " in capsys.readouterr().out
