"""A corpus of a dozen made-up towns and an encoder with random weights, for tests that run whole series of commands."""

import json
from collections.abc import Sequence
from pathlib import Path

TOWNS = "Aldora Benwick Corvale Dunmere Eastholm Farrowby Greymoor Halvern Ivystone Jorvale Kelmarsh Lorwick".split()
YEARS = ("1492", "1563", "1648", "1815")


def write_corpus(file: Path) -> list[str]:
    """Documents whose dates stand in several of them; returns their texts."""
    texts = [
        f"{town} is a town on the river Ystra. {town} was founded in {YEARS[i % 4]} by merchants from the coast. "
        f"Its old bridge was built in {YEARS[(i + 1) % 4]} and still stands. The people of {town} keep bees."
        for i, town in enumerate(TOWNS)
    ]
    documents = [{"title": town, "text": text} for town, text in zip(TOWNS, texts, strict=True)]
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return texts


def write_encoder(folder: Path, texts: Sequence[str]) -> None:
    """A BERT of one layer with random weights, in Hugging Face layout."""
    from realm.model.bert_files import save_bert
    from realm.model.masked_reader import EncoderConfig, new_reader
    from realm.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.train(texts, 250)
    tokenizer.save(folder)
    encoder = EncoderConfig(layers=1, hidden=32, heads=2, positions=128)
    save_bert(new_reader(encoder, tokenizer).bert, folder)
