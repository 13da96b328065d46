"""Headings and explanations of the stages of a table."""

from realm.stages.runner import Section

CORPUS = Section(
    "Corpus", "Documents are split into passages at ends of sentences, and names and dates are marked."
)
QUESTIONS = Section("Questions", "The questions are the same for every row.")
STARTING = Section(
    "Models before training on questions",
    "These commands make the encoder, the embedder (with the inverse cloze task, unless data.warm_start is false) and each "
    "variant of REALM, and compute the vectors of all passages.",
)
READERS = Section(
    "Reading",
    "The readers of all rows are first trained on the same questions, each with a passage that contains an answer.",
)
ROWS = Section(
    "Training on questions",
    "Each row is trained on the same questions. The weights that are best on the dev questions are kept.",
)
MEASURING = Section(
    "Measuring", "Each row answers the test questions. Answers, passages and scores are saved in files."
)
