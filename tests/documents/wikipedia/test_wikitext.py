"""What is left of MediaWiki's markup: words, lists, tables and links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.documents.wikipedia.wikitext import read_wikitext
from realm.text.corpus import Link
from realm.text.salient_spans import load_tagger


def test_words_links_and_signs_of_a_sentence_are_what_a_reader_sees() -> None:
    markup = (
        "'''Arden''' ({{IPA|x}}; {{lang|fr|Ardenne}}) is an ''old'' [[town]] on the [[ouse (river)#Bed|Ouse]],"
        " {{nowrap|in the [[North]]}} &ndash; see [http://a.b its page].<ref name=x>No</ref> <!-- no -->"
        "<math>x</math> {{formatnum:5000}} people{{formatnum:{{data|Arden}}}} {{as of|2010}}.[[de:Arden]][[Category:Towns]]"
    )
    found = read_wikitext(markup)
    assert found.text == (
        "Arden (Ardenne) is an old town on the Ouse, in the North – see its page. 5000 people As of 2010."
    )
    assert found.links == (Link(26, "Town"), Link(38, "Ouse (river)"), Link(51, "North"))
    assert not found.disambiguation


def test_templates_that_produce_words_are_replaced_by_them() -> None:
    for markup, text in {
        "Nero ({{circa|37}}; {{c.}})": "Nero (c. 37; c.)",
        "{{lang-fr|mot}}, {{langx|fr|mots|lit=words}}": "mot, mots",
        "{{HMS|Victory|1765}} met {{ship|French ship|Orient|1791}}": "HMS Victory met French ship Orient",
        "__NOTOC__A__FILE____notoc__ __index__": "A__FILE__ __index__",
        "{{quote||text=}} {{blockquote|text=Two ''words''|author=B}}{{quote}} {{quote||text=a}}": "Two words a",
        "{{lang|2=mot|1=fr}} {{quote|2=Author|1=Words}} {{langx|fr|text=mot}} a&#3;b": "mot Words mot ab",
        "{{start date|1999|12||df=no}} {{dts|1999|12|31|df=}}": "December 1999 December 31, 1999",
        "{{as of|1999|12|31}}": "As of 31 December 1999",
        "of {{plainlist|\n* [[Arden]]\n* Brack\n}}; {{hlist|a|b}}": "of Arden, Brack; a, b",
        "{{start date|1999|12|31|df=y}}, {{dts|1999|12}}, {{end date|1999|13}}": "31 December 1999, December 1999, 1999 13",
        "''Eagle''{{'s}} {{nowrap|1=''E'' = x}} 5{{nbsp}}km": "Eagle's E = x 5 km",
        "{{val|6.241|e=18}} {{val|3|u=km}} {{chem|C|H|4}} {{sortname|Ada|Byron}}": "6.241×10^18 3 km CH4 Ada Byron",
        "{|\n! Land !! Isles\n|-\n| {{flag|Azores}} || {{ubl|Pico|Flores}}\n|}": "Land: Azores; Isles: Pico, Flores.",
        "x{{hlist}}{{flag}}{{langx}}{{sortname|a}}{{ship}}{{start date}}{{val}}y": "xy",
    }.items():
        assert read_wikitext(markup).text == text


def test_lists_and_tables_become_sentences_and_lists_of_sources_vanish() -> None:
    markup = (
        'Rivers:\n* [[Ouse]]\n* Tees\n{| class="wikitable"\n|+ Towns\n! Name !! People\n|-\n| [[Arden]] || 500\n|-\n'
        "| Brack\n| 20\n|-\n| colspan=2 | none\n|}\n== References ==\n* A book\n=== More ===\n* Another\n== Later ==\nEnd."
    )
    text = read_wikitext(markup).text
    sentences = [
        "Rivers:", "Ouse", "Tees", "Towns", "Name: Arden; People: 500.", "Name: Brack; People: 20.", "none", "Later", "End.",
    ]  # fmt: skip
    assert text.split("\n\n") == sentences
    (found,) = load_tagger("realm").annotate([text])
    assert [text[start:end] for start, end in found.sentences] == sentences


def test_cells_that_span_rows_and_columns_are_in_the_sentence_of_each_row() -> None:
    markup = (
        "{| class=wikitable\n! colspan=9|Towns\n|-\n! rowspan=2|Year !! colspan=2|People\n|-\n!Men!!Women\n|-\n"
        "|rowspan=2|[[1900]]||400||300\n|-\n|500||350\n|-\n|-\n! colspan=3|After the flood\n|-\n"
        "!2000\n|colspan=2|none\n|-\n|2001\n|900\n|}"
    )
    found = read_wikitext(markup)
    assert found.text.split("\n\n") == [
        "Towns",
        "Year: 1900; People, Men: 400; People, Women: 300.",
        "Year: 1900; People, Men: 500; People, Women: 350.",
        "After the flood",
        "Year: 2000; People, Men: none; People, Women: none.",
        "2001 | 900",
    ]
    assert [found.text[link.start :][:5] for link in found.links] == ["1900;"] * 2
    below = "{|\n!A!!rowspan=2|B\n|-\n!A\n|-\n|1||rowspan=9|2\n|-\n|3\n|}"
    assert read_wikitext(below).text == "A: 1; B: 2.\n\nA: 3; B: 2."
    assert read_wikitext("{|\n!A!!B\n|-\n!1!!2\n|}").text == "A | B\n\n1 | 2"  # only headings


def test_links_of_headings_are_in_no_sentence_and_repeated_headings_make_none() -> None:
    headings = "! [[Name]] !! Age\n|-\n"
    found = read_wikitext(f"{{|\n{headings}| [[Ada]] || 36\n|-\n{headings}| Bob || 40\n|}}")
    assert found.text == "Name: Ada; Age: 36.\n\nName: Bob; Age: 40."
    assert found.links == (Link(6, "Ada"),)


def test_a_caption_with_attributes_is_no_cell_and_a_cell_with_a_plus_sign_is_no_caption() -> None:
    rows = "! Name !! Age\n|-\n| +5 || 1\n|}"
    for caption in ("|+ Towns", '|+ class="nowrap" | Towns', "|+class=nowrap|Towns"):
        assert read_wikitext(f"{{|\n{caption}\n{rows}").text == "Towns\n\nName: +5; Age: 1."


def test_a_page_that_lists_meanings_is_known_by_its_switch() -> None:
    found = read_wikitext("It may be:\n* [[A]]\n== See also ==\n* [[B]]\n\n__DISAMBIG__ [[Category:Names]]")
    assert found.disambiguation and found.text == "It may be:\n\nA"
    assert not read_wikitext("Write <nowiki>__DISAMBIG__</nowiki> on such pages.").disambiguation


@pytest.mark.parametrize(
    "template",
    [
        "disambiguation",
        "Disambig",
        "dab",
        "Human name disambiguation",
        "Geodis",
        "Begriffsklärung",
        "неоднозначность",
    ],
)
def test_pages_that_list_meanings_are_known_by_their_template(template: str) -> None:
    assert read_wikitext(f"It may be:\n* [[A]]\n{{{{{template}}}}}").disambiguation
    assert read_wikitext(f"It may be:\n* [[A]]\n== See also ==\n* [[B]]\n{{{{{template}|x}}}}").disambiguation


@given(
    st.lists(
        st.sampled_from(
            ["[[", "]]", "{{", "}}", "{|", "|}", "\n|-", "|", "''", "<ref>", "</ref>", "=", "a", "\n", "*"]
        )
    )
)
def test_no_markup_is_an_error_and_text_without_markup_stays(parts: list[str]) -> None:
    read_wikitext("".join(parts))
    plain = " ".join(part for part in parts if part == "a")
    assert read_wikitext(plain).text == plain


def test_a_link_stands_where_its_words_stand_after_the_markup_is_gone() -> None:
    markup = (
        "''[[a_b|''Ada'']]''  (; {{x}}) is {{nowrap| [[ bo#Life | the Bo ]]}}.[[C|{{flag}}]]\n\n\n\n"
        "{| \n|+ [[Tables|Caption]]\n! Name !! [[people|People]]\n|-\n|  [[:de:Arden|Arden]] || [[D|{{small|Dora}}]]\n|}\n"
        "* ( , [[AT&amp;T]]) [[Datei:x.png|thumb|[[Hidden]]]] <ref>[[Source]]</ref>&#2;0&#2;\n== See also ==\n* [[Seen]]"
    )
    found = read_wikitext(markup, ["Datei"])
    assert [(link.title, found.text[link.start :].split()[0]) for link in found.links] == [
        ("A b", "Ada"),
        ("Bo", "the"),
        ("Tables", "Caption"),
        ("De:Arden", "Arden;"),
        ("D", "Dora."),
        ("AT&T", "AT&T)"),
    ]
