"""The packaged model `realm-small` answers questions and fills masks from documents that it was not trained on."""

import pytest

import realm
from realm.workspace.folder import Workspace
from realm.workspace.settings import FitConfig

TOWNS = {
    "Arvelle": "Arvelle lies on the river Sorne. In 1412 Johanna Kestrel founded it. About 5,200 people live there.",
    "Dunmoor": "Dunmoor is known for its glass. The lighthouse of Dunmoor was built by Peter Ashgrove and opened in 1871.",
    "Quillby": "Quillby was the first town of the valley with a railway. Its mayor is Ruth Tamsin, who was elected in 2019.",
}
FERRIES = """Ferry,Captain,Length (m),Built,Next inspection
Heron,Ada Lindqvist,31.5,1998,2027-03-14
Gannet,Bo Maier,44.2,2006,2026-11-02
Plover,Cem Arslan,28,1987,2028-06-30
"""


@pytest.fixture(scope="module")
def towns(tmp_path_factory) -> Workspace:
    folder = tmp_path_factory.mktemp("small")
    for title, text in TOWNS.items():
        (folder / f"{title}.txt").write_text(text)
    (folder / "Ferries.csv").write_text(FERRIES)
    return realm.fit(
        [folder], folder / "made" / "towns", config=FitConfig(minutes=0, tagger="rules", device="cpu")
    )


@pytest.mark.parametrize(
    ("question", "answers"),
    [
        ("who founded Arvelle?", {"Johanna Kestrel"}),
        ("when was the lighthouse of Dunmoor opened?", {"1871"}),
        ("who is the mayor of Quillby?", {"Ruth Tamsin"}),
        ("how many people live in Arvelle?", {"5,200", "About 5,200"}),
        ("who is the captain of the Gannet?", {"Bo Maier"}),
        ("how long is the Heron?", {"31.5"}),
        ("when is the next inspection of the Plover?", {"2028-06-30"}),
        ("which ferry has Ada Lindqvist as captain?", {"Heron"}),
    ],
)
def test_it_answers_from_documents_that_it_never_saw(towns, question: str, answers: set[str]) -> None:
    assert towns.answer(question).text in answers


def test_it_fills_a_gap_with_a_word_of_a_passage(towns) -> None:
    filled = towns.fill("The lighthouse of Dunmoor was built by Peter [MASK].")
    assert filled.masks[0][0].text == "ashgrove"
