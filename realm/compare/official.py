"""Recognises published question sets by their questions and answers. The format of the files has no effect."""

import hashlib
from collections.abc import Sequence

from realm.qa.question_files import Question

PUBLISHED = {
    "dade4edebb0a64aa": "NQ-open dev, which papers report as test",
    "30a3d3f0f1c39e18": "WebQuestions trainmodel",
    "46e2a8755a3bdc71": "WebQuestions val",
    "cd4cfa09efd47fdd": "WebQuestions devtest",
    "74b8d1a4ddb2bfdd": "WebQuestions train",
    "e0273bd39867bdb8": "CuratedTREC train",
    "d9707b3d59827d77": "NQ dev of DPR and of ORQA's resplit",
    "cf5e38a88ee21627": "WebQuestions dev of ORQA's resplit",
    "36489c87121081ce": "CuratedTREC dev of ORQA's resplit",
}
"""Digest of a set -> name of the set."""


def content_digest(questions: Sequence[Question]) -> str:
    """Digest of questions and their answers. Order, ids, case of questions, and spaces around texts have no effect."""
    lines = sorted(
        "\t".join([one.question.strip().lower(), *sorted(answer.strip() for answer in one.answers)])
        for one in questions
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def recognised(questions: Sequence[Question]) -> str | None:
    """The name of the published set that has exactly these questions; None if there is no such set."""
    return PUBLISHED.get(content_digest(questions))
