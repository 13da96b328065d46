"""What the corpus itself says of names: which is a country, who is a person, and so how to ask for one."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from realm.questions.topics import Topic


class Known(NamedTuple):
    """What the corpus says of names: the kind ("country", "person") behind each title, and its people's surnames."""

    kinds: Mapping[str, str]
    surnames: frozenset[str]

    def kind(self, name: str) -> str:
        """Its own last word if that is telling ("Zhejiang province"), else the corpus's; empty if unknown."""
        words = name.lower().split()
        own = next((word for word in reversed(words) if word in _NAMED), "")
        kind = own or self.kinds.get(name.lower(), "")
        return _ALIKE.get(kind, kind)


def known_names(topics: Iterable[Topic]) -> Known:
    """What the topics of all documents say."""
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
    """The word that asks for a span; None where tagger and corpus do not agree on what it is."""
    kind = known.kind(answer)
    if kind == "person":
        return "who"
    if kind in PLACES and label == "PERSON":
        return None
    if kind in _NAMED:
        return f"which {kind}"
    match label:
        case "PERSON":  # taggers take many a rare word for a person: two words, or somebody's surname
            named = " " in answer or answer.lower() in known.surnames
            return "who" if named and not kind and answer[0].isupper() else None
        case "NORP":
            return "who" if answer.endswith("s") else None
        case "LANGUAGE":
            return "which language"
        case "DATE":
            return None
    return "what"
