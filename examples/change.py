"""Adds a document to a workspace and deletes the document again; retrieval uses each change at once.

python examples/change.py manual
"""

import sys

import realm


def main(workspace: str) -> None:
    """Prints the number of documents and the titles found for a question: at first, after the addition, after the deletion."""
    manual = realm.load(workspace)

    def show(when: str) -> None:
        found = [passage.title for passage in manual.retrieve("which devices were recalled?", top_k=3)]
        print(f"{when}: {len(manual.documents())} documents, the best passages are from {', '.join(found)}")

    show("before the addition")
    manual.add([{"title": "Recall", "text": "Devices made before 2019 were recalled.", "id": "recall"}])
    show("after the addition")
    manual.delete(["recall"])
    show("after the deletion")


if __name__ == "__main__":
    main(*sys.argv[1:])
