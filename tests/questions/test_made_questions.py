import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.qa.question_files import read_questions
from realm.qa.scoring.metrics import normalise_answer
from realm.questions import make_questions, split
from realm.questions.verbs import BE, FORMS, PARTICIPLES, PAST
from realm.text.corpus import Passage, Span, passage_id


def passage(title: str, text: str, *names: str, document_id: str | None = None) -> Passage:
    """Names are "text LABEL", each marked where it first stands."""
    spans = []
    for name, label in (name.rsplit(" ", 1) for name in names):
        start = text.index(name)
        spans.append(Span(start, start + len(name), label))
    sentences = tuple((m.start(), m.end()) for m in re.finditer(r"\S.*?[.](?=\s[A-Z]|$)", text))
    return Passage(
        passage_id(title, text), document_id or title, title, text, sentences, tuple(sorted(spans))
    )


COUNTRY = passage("Spain", "Spain is a country.")
PEOPLE = [
    passage("Pablo Picasso", "Pablo Picasso was a painter. He died in 1973."),
    passage("John Smith", "John Smith was a soldier. He liked himself."),
]


def asked(*passages: Passage, **options: Any) -> dict[str, str]:
    return {q.question: q.answers[0] for q in make_questions(passages, **options)}


@pytest.mark.parametrize(
    ("title", "text", "names", "question", "answer"),
    [
        (
            "Guernica (Picasso)",
            "Guernica is a painting by the Spanish artist Pablo Picasso.",
            ["Pablo Picasso PERSON"],
            "who painted guernica?",
            "Pablo Picasso",
        ),
        (
            "A.13. SteamOS",
            "SteamOS is an operating system. It is used in Steam Machine.",
            ["Steam Machine PRODUCT"],
            "what is steamos used in?",
            "Steam Machine",
        ),
        (
            "Psycho (1960 film)",
            "Psycho is a 1960 American horror film produced by him. The film was directed by Alfred Hitchcock.",
            ["1960 DATE", "Alfred Hitchcock PERSON"],
            "who directed psycho?",
            "Alfred Hitchcock",
        ),
        (
            "Psycho (1960 film) - Films | Encyclopedia",
            "Psycho is a 1960 American horror film produced by him. The film was directed by Alfred Hitchcock.",
            ["Alfred Hitchcock PERSON"],
            "who directed psycho?",
            "Alfred Hitchcock",
        ),
        (
            "Alien - Covenant - Wikipedia",
            "Alien - Covenant is a horror film produced by him. The film was directed by Ridley Scott.",
            ["Ridley Scott PERSON"],
            "who directed alien - covenant?",
            "Ridley Scott",
        ),
        (
            "Paris - Roubaix",
            "Paris to Roubaix is a cycling race organized by him. The race was directed by Ridley Scott.",
            ["Ridley Scott PERSON"],
            "who directed paris - roubaix?",
            "Ridley Scott",
        ),
        (
            "Psycho",
            "Psycho is a 1960 American horror film.",
            ["1960 DATE"],
            "when was psycho released?",
            "1960",
        ),
        (
            "Ada Lovelace",
            "Augusta Ada King was a mathematician. She was born in London, England, in 1815.",
            ["London GPE", "England GPE", "1815 DATE"],
            "where was ada lovelace born?",
            "London",
        ),
        (
            "Ada Lovelace",
            "Ada Lovelace was a mathematician. In 1843, she published her notes on the engine, and was proud.",
            ["1843 DATE"],
            "when did ada lovelace publish her notes on the engine?",
            "1843",
        ),
        (
            "Ada Lovelace",
            "Ada Lovelace was a mathematician. After her years in Bath, Lovelace wrote the program on 10 July 1843.",
            ["10 July 1843 DATE"],
            "when did ada lovelace write the program?",
            "10 July 1843",
        ),
        (
            "Ebro",
            "The Ebro is a river in Spain.",
            ["Spain GPE"],
            "which country is the ebro in?",
            "Spain",
        ),
        (
            "Madrid",
            "Madrid is the capital of Spain.",
            ["Spain GPE"],
            "which country is madrid the capital of?",
            "Spain",
        ),
        (
            "Utopia",
            "Utopia is an island that was discovered in 1516 by sailors.",
            ["1516 DATE"],
            "when was utopia discovered by sailors?",
            "1516",
        ),
        (
            "Pascal",
            "The pascal is a unit. It is named after Blaise Pascal.",
            ["Blaise Pascal PERSON"],
            None,  # the answer holds the title
            None,
        ),
        (
            "Rome",
            "Rome is a city. It was founded by John Smith (a soldier) in 753 BC (so it is said).",
            ["John Smith PERSON", "753 BC DATE"],
            "who founded rome in 753 bc?",
            "John Smith",
        ),
        (
            "Triton (moon)",
            "Triton is a moon. It orbits Neptune in a retrograde orbit.",
            ["Neptune LOC"],
            "what does triton orbit in a retrograde orbit?",
            "Neptune",
        ),
        (
            "Iron",
            "Iron is a chemical element; it has symbol Fe and atomic number 26.",
            [],
            "what is the atomic number of iron?",
            "26",
        ),
        (
            "Oslo",
            "Oslo is a city. With a population of about 709,000, it is large.",
            [],
            "what is the population of oslo?",
            "709,000",
        ),
        ("Fiji", "Fiji is a country. It has 14 provinces.", [], "how many provinces does fiji have?", "14"),
        (
            "Portugal",
            "Portugal is a country. It is bordered by Spain to the east and the Atlantic to the west.",
            ["Spain GPE"],
            "which country borders portugal to the east?",
            "Spain",
        ),
        (
            "Swan",
            "Swans are birds of the family Anatidae.",
            [],
            "which family do swans belong to?",
            "Anatidae",
        ),
        (
            "Mumbai",
            "Mumbai, formerly known as Bombay, is a city.",
            [],
            "what is mumbai formerly known as?",
            "Bombay",
        ),
        (
            "Confucianism",
            "Confucianism, also known as Ruism or Ru classicism, is a system of thought.",
            [],
            "what is confucianism also known as?",
            "Ruism",
        ),
        (
            "Finland",
            "Finland is a country. Its capital and largest city is Helsinki.",
            ["Helsinki GPE"],
            "what is the capital and largest city of finland?",
            "Helsinki",
        ),
        (
            "Zagros Mountains",
            "The Zagros Mountains are a range. Their highest point is Mount Dena, at 4,409 metres.",
            ["Mount Dena PERSON"],
            "what is the highest point of the zagros mountains?",
            "Mount Dena",
        ),
        (
            "Guernica",
            "Guernica is a work. Pablo Picasso painted Guernica in Paris.",
            ["Pablo Picasso PERSON"],
            "who painted guernica in paris?",
            "Pablo Picasso",
        ),
        (
            "Stanley Kubrick",
            "Stanley Kubrick (/ˈkuːbrɪk/; July 26, 1928 – March 7, 1999) was a director. He worked.",
            [],
            "when was stanley kubrick born?",
            "July 26, 1928",
        ),
        (
            "Stanley Kubrick",
            "Stanley Kubrick (26 July 1928 – 7 March 1999) was a director. He worked.",
            [],
            "when did stanley kubrick die?",
            "7 March 1999",
        ),
    ],
)
def test_a_sentence_becomes_this_question(
    title: str, text: str, names: list[str], question: Any, answer: Any
) -> None:
    made = asked(passage(title, text, *names), COUNTRY, *PEOPLE)
    if question is None:
        assert not made
    else:
        assert made[question] == answer


def test_nationality_or_profession_is_asked_of_about_half_the_people() -> None:
    people = [
        passage(f"Ann Name{n}", f"Ann Name{n} was a German chemist. She worked.", "German NORP")
        for n in range(200)
    ]
    made = make_questions(people)
    assert 70 < len(made) < 130
    assert {re.sub(r"ann name\d+", "X", q.question) for q in made} == {
        "what nationality was X?",
        "what was the nationality of X?",
        "what did X do for a living?",
        "what was the profession of X?",
    }
    assert {q.answers[0] for q in made} == {"German", "chemist"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("The Ebro is a river. It rises in Spain and France.", ["Spain GPE"]),  # half a list
        ("The Ebro is a river. It rises in Spain Minor.", ["Spain GPE"]),  # part of a name
        ("The Ebro is a river. It rises in Spain's north.", ["Spain GPE"]),
        ("The Ebro is a river. This was shown in 1900.", ["1900 DATE"]),  # points outside
        ("The Ebro is a river. It was not that which was found in 1900.", ["1900 DATE"]),
        ("The Ebro is a river. Spain is large.", ["Spain GPE"]),  # another subject
        ("The Ebro is a river. She rose in Spain.", ["Spain GPE"]),  # another pronoun
        ("The Ebro is a river. It has been dammed since 1900.", ["1900 DATE"]),  # a verb form not understood
        ("The Ebro is a river. It was John Smith in 1752 who mapped its course.", ["1752 DATE"]),
        ("The Ebro is a wide river originated in Spain.", ["Spain GPE"]),  # not: is originated
        ("The Ebro is best remembered for the flood of Tortosa in 1907.", ["1907 DATE"]),
        ("The Ebro, emerged in Spain, is a river.", ["Spain GPE"]),
        ("The Ebro is a river. It was formerly known as the Lower or Nizhnyaya Angara.", []),  # half a name
        ("The Ebro is a river. It is in a metropolitan area of 12.9 million people.", []),  # not an area
        ("The Ebro is a river. It has a width of 60–85 metres.", []),  # half a range
        (
            "The Ebro is a river. It is known to flow through a plain, settled in 1900.",
            ["1900 DATE"],
        ),  # the plain was
        ("The Ebro is a river. It flows in Aragon and to a lesser extent elsewhere in Spain.", ["Spain GPE"]),
        ("The Ebro is a river. It flows in Aragon and then in Spain.", ["Spain GPE"]),
        ("Nothing here", []),
        ("", []),
    ],
)
def test_what_is_not_understood_makes_no_question(text: str, names: list[str]) -> None:
    assert not asked(passage("Ebro", text, *names), COUNTRY)


def test_a_genus_is_not_the_person_who_described_it() -> None:
    text = (
        "Tagetes is a genus of plants. In 1754 he described the genus in his Genera Plantarum, and was proud."
    )
    assert not asked(passage("Tagetes", text, "1754 DATE"))


@pytest.mark.parametrize(
    "kind",
    ["an Egyptian queen", "a god", "the third of the kings", "a rare medievalist", "a jazz and swing singer"],
)
def test_a_person_has_the_kind_of_a_person_or_the_tag_of_one(kind: str) -> None:
    died = passage("Nefret", f"Nefret was {kind}. She died in 1300.", "1300 DATE")
    tagged = passage("Nefret", "Nefret was a recluse. She died in 1300.", "Nefret PERSON", "1300 DATE")
    assert list(asked(died).values()) == list(asked(tagged).values()) == ["1300"]


def test_later_passages_of_a_document_are_about_its_first_sentence() -> None:
    first = passage("Ada Lovelace", "Ada Lovelace was a mathematician. She wrote.", document_id="d1")
    second = passage("Ada Lovelace", "She died in London.", "London GPE", document_id="d1")
    [question] = make_questions([first, second])
    assert question.question == "where did ada lovelace die?"
    assert (question.passage_id, question.document_id) == (second.id, "d1")


def corpus(n: int) -> Iterator[Passage]:
    for i in range(n):
        text = (
            f"Town{i} is a city in Spain. It was founded in {1000 + i}. It was sold on 5 May {1500 + i}. It has {i + 2} gates."
            f" It has a population of {5000 + i}."
        )
        yield passage(f"Town{i}", text, "Spain GPE", f"{1000 + i} DATE", f"5 May {1500 + i} DATE")


def test_the_same_seed_makes_the_same_questions_and_a_document_no_more_than_its_share() -> None:
    towns = [COUNTRY, *corpus(40)]
    made = make_questions(towns, seed=1, most_per_document=2)
    assert made == make_questions(iter(towns), seed=1, most_per_document=2)
    assert made != make_questions(towns, seed=2, most_per_document=2)
    assert len(made) == 80
    alone = make_questions([COUNTRY, *corpus(1)], seed=1, most_per_document=2)
    assert alone == made[:2]  # other documents do not change a document's questions


def test_a_text_that_two_documents_share_is_asked_about_once() -> None:
    [town] = corpus(1)
    made = make_questions([town, town._replace(document_id="copy")])
    assert len({q.id for q in made}) == len(made) > 0


def test_split_keeps_documents_together_and_does_not_move_them() -> None:
    made = make_questions([COUNTRY, *corpus(300)])
    train, dev = split(made, 0.2, seed=3)
    assert sorted(train + dev) == sorted(made)
    assert not {q.document_id for q in train} & {q.document_id for q in dev}
    assert 0.1 < len({q.document_id for q in dev}) / 300 < 0.3
    assert split(made[: len(made) // 2], 0.2, seed=3)[1] == [q for q in dev if q in made[: len(made) // 2]]
    assert split(made, 0.2, seed=4)[1] != dev
    assert split(made, 0.0)[1] == []


def test_questions_are_read_back_from_their_json(tmp_path: Path) -> None:
    made = make_questions([COUNTRY, *corpus(5)])
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(q._asdict()) + "\n" for q in made), encoding="utf-8")
    assert [(q.id, q.question, q.answers) for q in read_questions(path)] == [q[:3] for q in made]


words = st.sampled_from(
    "Ebro It The He Spain Paris Ann 1900 is was are born in on by the a of and which who , . ; ( ) : river city"
    " founded directed has had 12 gates with population known as also named after to north border borders family genus".split()
)


@given(
    st.lists(words, max_size=40),
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 12)), max_size=6),
    st.data(),
)
def test_any_text_gives_answers_that_are_at_their_offsets(
    tokens: list[str], places: list[tuple[int, int]], data: st.DataObject
) -> None:
    text = " ".join(tokens)
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)) | {0, len(text)})
    labels = st.sampled_from(["PERSON", "GPE", "DATE", "NORP", "ORG"])
    spans, at = [], 0
    for gap, length in places:
        start = at + gap % 20
        at = start + length
        if at <= len(text):
            spans.append(Span(start, at, data.draw(labels)))
    given_passage = Passage("id", "d", "Ebro", text, tuple(itertools.pairwise(ends)), tuple(spans))
    for question in make_questions([given_passage]):
        answer = text[question.answer_start : question.answer_end]
        assert question.answers == (answer,)
        assert f" {normalise_answer(answer)} " not in f" {normalise_answer(question.question)} "
        assert question.question == question.question.lower() and question.question.endswith("?")


def test_verb_forms_lead_back_to_their_base() -> None:
    expected = {
        "wrote": ("write", "did"),
        "borders": ("border", "does"),
        "studied": ("study", "did"),
        "goes": ("go", "does"),
    }
    expected |= {
        "founded": ("found", "did"),
        "found": ("find", "did"),
        "lay": ("lie", "did"),
        "rise": ("rise", "do"),
    }
    assert {word: FORMS[word] for word in expected} == expected
    assert not BE & set(FORMS)
    assert PAST[PARTICIPLES["written"]] == "wrote" and PARTICIPLES["founded"] == "found"
