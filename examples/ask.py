"""Makes a workspace from a folder of documents, answers a question, and shows the best passages.

python examples/ask.py docs/ manual "how do I reset the device?"
"""

import sys

import realm


def main(documents: str, workspace: str, question: str) -> None:
    """Prints the answer with its evidence, and three passages. A second call uses the workspace that the first call made."""
    manual = realm.fit([documents], workspace)
    answer = manual.answer(question)
    print(f"{answer.text} (probability {answer.probability:.2f}), from {answer.passage.title}:")
    print(answer.evidence())
    for passage in manual.retrieve(question, top_k=3):
        print(f"{passage.rank}. {passage.title}: {passage.text[:60]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
