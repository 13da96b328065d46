"""Decides which drafts are good questions."""

import re

from realm.questions.topics import Topic
from realm.questions.words import content_words

QUESTION_WORDS = (3, 20)
"""Fewest and most words of a question."""
ANSWER_WORDS = 8


def tidy(question: str) -> str:
    """The question in lower case, with single spaces and a question mark, and without quotation marks."""
    question = " ".join(re.sub(r'["“”]', "", question.lower()).split())
    return re.sub(r" (?=[,.])", "", question).strip(" ,.;:") + "?"


_POINTS_OUTSIDE = re.compile(
    r"\b(?:this|these|those|such|latter|former|respectively|above|below|another|others?|here|same|both|neither|either|it"
    r"|ones?|not|than|more|so|e\.g|i\.e|etc)\b"
)


def is_sound(question: str, answer: str, topic: Topic) -> bool:
    """Whether a tidy question can be understood alone and does not contain its answer, and both have a suitable length."""
    words, answer_words = question.split(), content_words(answer)
    return (
        QUESTION_WORDS[0] <= len(words) <= QUESTION_WORDS[1]
        and 1 <= len(answer.split()) <= ANSWER_WORDS
        and "\n" not in answer
        and not answer_words & content_words(question)
        and not answer_words <= content_words(topic.bare)
        and topic.bare.lower() not in answer.lower()
        and not _POINTS_OUTSIDE.search(question)
        and words[-1] not in ("a?", "an?", "and?", "but?", "or?", "the?")
        and not set(words) & ({"its", "his", "her"} - {topic.possessive})
    )
