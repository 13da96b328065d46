"""Files of tokenizers that the library loads but cannot use, or panics at, are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from realm.errors import RealmError
from realm.hub import encoder_folder
from realm.tokens.tokenizer import Tokenizer

PANICS = {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAAAAAAAAAA"}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": PANICS},
        {"normalizer": PANICS | {"precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"model": {"type": "WordLevel", "unk_token": "no such word"}},
        {"model": {"vocab": {"town": 2**31 - 1}}},
        {"model": {"vocab": {"town": 4_000_000_000}}},
    ],
    ids=str,
)
def test_a_hostile_tokenizer_is_refused_with_one_message(change: dict[str, Any], tmp_path: Path) -> None:
    found = json.loads((Path(encoder_folder("package:realm-mini")) / "tokenizer.json").read_text())
    model = dict(found["model"])
    if "model" in change:
        vocab = model["vocab"] | change["model"].get("vocab", {})
        if change["model"].get("type") == "WordLevel":
            model = {**change["model"], "vocab": vocab}
        else:
            model |= {"vocab": vocab}
    (tmp_path / "tokenizer.json").write_text(json.dumps(found | change | {"model": model}))
    with pytest.raises(
        RealmError, match=r"is not a tokenizer|wordpieces, one of which has the number"
    ) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)
