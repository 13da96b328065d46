"""Makes a workspace of a folder of documents, and asks it something.

python examples/ask.py docs/ manual "how do I reset the device?"
"""

import sys

import realm


def main(documents: str, workspace: str, question: str) -> None:
    """Answers the question with its evidence; the second time the workspace is there already."""
    manual = realm.fit([documents], workspace)
    answer = manual.answer(question)
    print(f"{answer.text} (probability {answer.probability:.2f}), from {answer.passage.title}:")
    print(answer.evidence())
    for passage in manual.retrieve(question, top_k=3):
        print(f"{passage.rank}. {passage.title}: {passage.text[:60]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
