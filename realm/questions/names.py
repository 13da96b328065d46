"""Finds the question word for a name ("who", "which country"). Titles of the corpus show which names are people or places."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from realm.questions.topics import Topic


class Known(NamedTuple):
    """Knowledge about names from the corpus: title -> kind ("country", "person"), and the surnames of people."""

    kinds: Mapping[str, str]
    surnames: frozenset[str]

    def kind(self, name: str) -> str:
        """The kind of a name: a word of the name itself ("Zhejiang province"), else the kind in the corpus; "" if unknown."""
        words = name.lower().split()
        own = next((word for word in reversed(words) if word in _NAMED), "")
        kind = own or self.kinds.get(name.lower(), "")
        return _ALIKE.get(kind, kind)


def known_names(topics: Iterable[Topic]) -> Known:
    """Knowledge about names from the topics of all documents."""
    kinds = {topic.bare.lower(): "person" if topic.person else topic.kind for topic in topics}
    return Known(kinds, frozenset(name.split()[-1] for name, kind in kinds.items() if kind == "person"))


PLACES = frozenset(
    "country state city town village province region county district continent island kingdom municipality department"
    " prefecture republic peninsula territory ocean sea lake river borough valley desert governorate oblast voivodeship"
    " archipelago mountain".split()
)
_NAMED = PLACES | frozenset(
    "university college school war prize award medal empire dynasty party church company band language century".split()
)
_ALIKE = {"metropolis": "city", "capital": "city", "subcontinent": "region", "nation": "country"}


def who_or_what(answer: str, label: str, known: Known) -> str | None:
    """The question word for a span; None if tagger and corpus do not agree on the kind of the span, or if there is no word."""
    kind = known.kind(answer)
    if kind == "person":
        return "who"
    if kind in PLACES and label == "PERSON":
        return None
    if kind in _NAMED:
        return f"which {kind}"
    match label:
        # Taggers often mistake rare words for people, so two words or a known surname are required.
        case "PERSON":
            named = " " in answer or answer.lower() in known.surnames
            return "who" if named and not kind and answer[0].isupper() else None
        case "NORP":
            return "who" if answer.endswith("s") else None
        case "LANGUAGE":
            return "which language"
        case "DATE":
            return None
    return "what"
