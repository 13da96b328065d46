"""English function words and adverbs that the rules need; verbs are in `verbs`."""

import re

_FUNCTION_WORDS = frozenset("a an the of in on at and or to for from by with s".split())
PREPOSITIONS = frozenset(
    "in of on by for from with at to as near between within under during along against after before through into over"
    " among across around since until about via without".split()
)
LINKS = frozenset("that which who whose whom where when while and or but".split())
ADVERBS = frozenset(
    "also later then subsequently eventually soon finally often usually commonly typically generally primarily mainly"
    " predominantly officially formally originally initially thus therefore now currently still largely mostly widely"
    " probably traditionally further jointly together successfully briefly already again best especially particularly"
    " sometimes frequently historically ultimately once".split()
)


def content_words(text: str) -> set[str]:
    """Words in lower case, without function words."""
    return set(re.findall(r"\w+", text.lower())) - _FUNCTION_WORDS
