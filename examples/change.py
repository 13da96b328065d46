"""Adds a document to a workspace and deletes it again; answers follow at once.

python examples/change.py manual
"""

import sys

import realm


def main(workspace: str) -> None:
    """Shows how many documents there are, and what a question finds, before, between and after."""
    manual = realm.load(workspace)

    def show(when: str) -> None:
        found = [passage.title for passage in manual.retrieve("which devices were recalled?", top_k=3)]
        print(f"{when}: {len(manual.documents())} documents, first of all {', '.join(found)}")

    show("before")
    manual.add([{"title": "Recall", "text": "Devices made before 2019 were recalled.", "id": "recall"}])
    show("added")
    manual.delete(["recall"])
    show("deleted")


if __name__ == "__main__":
    main(*sys.argv[1:])
