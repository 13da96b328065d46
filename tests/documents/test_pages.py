"""HTML: what a reader of the page sees, in time linear in the page."""

import itertools
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realm.documents.formats.page_target import DEEPEST, PageError
from realm.documents.formats.pages import Page, read_page
from realm.documents.formats.sections import Heading
from realm.documents.reading import read_documents


@pytest.mark.parametrize("element", ["noscript", "button", "nav", "select", "svg", "textarea", "object"])
def test_text_behind_an_element_that_was_never_closed_is_kept(element: str) -> None:
    text = read_page(f"<p>One.</p><{element}>x<p>Two.</p><div>Three.</div>").text
    for words in ("One.", "Two.", "Three."):
        assert words in text


@pytest.mark.parametrize("element", ["noscript", "button"])
def test_bare_text_in_what_browsers_show_is_kept(element: str) -> None:
    assert read_page(f"<div>One <{element}>two three</div> four").text.split() == [
        "One",
        "two",
        "three",
        "four",
    ]


@pytest.mark.parametrize("element", ["script", "style", "template", "iframe", "nav", "select", "svg"])
def test_what_no_reader_of_the_page_reads_is_left_out(element: str) -> None:
    page = read_page(f"<title>T</title><p>One.</p><{element}><h2>no</h2><li>no</{element}><h3>H</h3>Two.")
    assert page == Page("T", "One.\n\nH\n\nTwo.", (Heading(6, 3, "H"),))
    assert page.main_heading == "H"


@pytest.mark.parametrize(
    "element",
    ['ul class="docnav top"', 'div class="navheader"', "div role=navigation", 'ol class="breadcrumbs"'],
)
def test_what_is_called_navigation_is_left_out(element: str) -> None:
    (tag, _) = element.split(maxsplit=1)
    page = read_page(f"<p>One.</p><{element}><li><div>Prev</div><a href=x>Up</a></{tag}>Two.")
    assert page.text == "One.\n\nTwo."
    never_closed = read_page(f"<p>One.</p><{element}>x<p>Two.").text
    assert never_closed == "One.\n\nx\n\nTwo."


def test_a_page_whose_body_is_called_navigation_is_kept() -> None:
    assert read_page('<body class="nav menu"><div class=navy>One.</div>Two.').text == "One.\n\nTwo."


def test_a_paragraph_alone_in_a_cell_is_a_cell() -> None:
    row = "<tr><td><p>Town</p></td><td>\n<p>River</p>\n</td></tr>"
    assert read_page(f"<p>x</p><table>{row}{row}</table><p>y</p>").text.split("\n\n") == [
        "x",
        *["Town | River"] * 2,
        "y",
    ]
    layout = "<table><tr><td>Zero<p>One.</p><p>Two.</p>Three.<td><p>Four.</p><p>Five.</table><p>Six."
    assert read_page(layout).text.split("\n\n") == [
        "Zero",
        "One.",
        "Two.",
        "Three.",
        "Four.",
        "Five.",
        "Six.",
    ]


def test_rows_below_headings_are_sentences_with_the_names_of_the_columns() -> None:
    def blocks(page: str) -> list[str]:
        return read_page(page).text.split("\n\n")

    head = "<table>\n<thead><tr>\n<th><div>Port</div></th>\n<th>Speed</th>\n</tr></thead>"
    page = read_page(
        f"{head}<tr>\n<td> <b>WAN</b> \n<td>2.5 <a href=x>Gbit/s</a>\n<tr><td>LAN<td></table>End."
    )
    assert page.text == "Port: WAN; Speed: 2.5 Gbit/s.\n\nPort: LAN.\n\nEnd."
    assert [page.text[one.start :][:6] for one in page.anchors] == ["Gbit/s"]
    several = blocks(f"{head}<tr><td>a<td><p>One.<p>Two.<tr><td>c<td>d")
    assert several == ["a | One.", "Two.", "Port: c; Speed: d."]
    bare = "<table><tr><th>Port<th>Speed"
    wide = blocks(f"{bare}<tr><td>a<td>b<td>c<tr><td colspan=2>closed</table>")
    assert wide == ["Port | Speed", "a | b | c", "closed"]
    assert blocks(f"{head}<tr><th>a<td>b<tr><td>a<td>b<td>c") == ["Port: a; Speed: b.", "a | b | c"]
    inner = "<table><tr><th>x<th>y<tr><td>5<td>6</table>"
    assert blocks(f"{head}<tr><td>1<td>{inner}<tr><td>7<td>8</table>") == [
        "1 |",
        "x: 5; y: 6.",
        "Port: 7; Speed: 8.",
    ]
    assert blocks(f"a{bare}</table>b") == ["a", "Port | Speed", "b"]  # a table for layout
    assert blocks("<table><tr><th>Capital<td>Paris<tr><th>Area<td>5") == ["Capital | Paris", "Area | 5"]


def test_cells_that_span_rows_and_columns_are_in_the_sentence_of_each_row() -> None:
    head = "<th rowspan=2>Year<th colspan=2><a href=p>People</a><tr><th>Men<th>Women"
    rows = (
        "<tr><td rowspan=2><a href=y>1900</a><td>400<td>300<tr><td>500<td>350<tr><td colspan=3>After the flood"
        "<tr><th>2000<td colspan=2>none<tr><td>2001<td>900"
    )
    page = read_page(f"<table><tr><th colspan=3>Towns<tr>{head}{rows}</table>End.")
    assert page.text.split("\n\n") == [
        "Towns",
        "Year: 1900; People, Men: 400; People, Women: 300.",
        "Year: 1900; People, Men: 500; People, Women: 350.",
        "After the flood",
        "Year: 2000; People, Men: none; People, Women: none.",
        "2001 | 900",
        "End.",
    ]
    assert [(one.address, page.text[one.start :][:5]) for one in page.anchors] == [("y", "1900;")] * 2
    groups = (
        "<thead><tr><th rowspan=9>A<th>B</thead><tbody><tr><td rowspan=0>1<td>2<tr><td>3<tbody><tr><td>4<td>5"
    )
    assert read_page(f"<table>{groups}</table>").text.split("\n\n") == [
        "A: 1; B: 2.",
        "A: 1; B: 3.",
        "A: 4; B: 5.",
    ]
    blocks = "<tr><td rowspan=2><p>One.<p>Two.<td>1<tr><td>2<tr><td>3<td>4"
    text = read_page(f"<table><tr><th>A<th>B{blocks}</table>").text
    assert text.split("\n\n") == ["One.", "Two.", "1", "2", "A: 3; B: 4."]


@example([["<th>{}"] * 2, ["<td>{}"] * 3])
@example([["<th>{}"] * 3, ["<th>{}"] * 2, ["<td>{}"] * 3, ["<td>{}"] * 2])
@example([["<th>{}"] * 2, ["<td>{}", "<td><p>{}</p><p>x"]])
@given(
    st.lists(
        st.lists(
            st.sampled_from(
                "<td>{},<th>{},<td><p>{},<td><div>{}</div>,<td>{}<table><tr><td>q,<td rowspan=2>{},<th colspan=2>{}".split(
                    ","
                )
            )
        ),
        max_size=5,
    )
)
def test_every_word_of_a_table_is_kept(rows: list[list[str]]) -> None:
    numbers = itertools.count()
    source = "".join("<tr>" + "".join(cell.format(f"w{next(numbers)}e") for cell in row) for row in rows)
    text = read_page(f"<p>a<table>{source}</table><p>b").text
    assert set(re.findall(r"w\d+e", text)) == set(re.findall(r"w\d+e", source))
    assert text.startswith("a") and text.endswith("b")


def table(*rows: str) -> str:
    """The text of a table with these rows, without blank lines."""
    return read_page("<table>" + "".join(f"<tr>{row}" for row in rows) + "</table>").text.replace(
        "\n\n", "\n"
    )


def test_headings_beside_an_empty_first_cell_are_the_headings_of_the_columns() -> None:
    assert table("<td><th>2019<th>2020", "<th>Sales<td>5<td>6") == "Sales; 2019: 5; 2020: 6."
    assert table("<td rowspan=2><th colspan=2>Sales", "<th>May<th>June", "<th>Oslo<td>5<td>6") == (
        "Oslo; Sales, May: 5; Sales, June: 6."
    )
    assert (
        table("<th>Capital<td>", "<th>River<td>Ouse") == "Capital |\nRiver | Ouse"
    )  # no headings of columns


def test_headings_that_a_table_repeats_are_no_sentence() -> None:
    again = "<th><a href=x>Name</a><th>Age"
    text = table(again, "<td>Ada<td>36", "<th colspan=2>Men", again, "<td>Bob<td>40", "<th>All<th>76")
    assert text == "Name: Ada; Age: 36.\nMen\nName: Bob; Age: 40.\nName: All; Age: 76."


def test_totals_above_the_other_rows_are_no_headings() -> None:
    head, foot = "<thead><tr><th>A<th>B</thead>", "<tfoot><tr><th>All<th>3</tfoot>"
    text = read_page(f"<table>{head}{foot}<tbody><tr><td>1<td>2</table>").text
    assert text == "A: All; B: 3.\n\nA: 1; B: 2."


def test_rows_without_words_leave_no_signs() -> None:
    assert table("<td>a<td>b", "<td><td><img src=x>", "<td>c<td>d") == "a | b\nc | d"


OF_WIKIS = (
    "<div class=metadata>Author: Ada</div><h2>History</h2><div class=reference>Old.</div><h2>References</h2><p>A book."
    "<h3>More</h3><p>Another.<h2>Later</h2><p>The end."
)


def test_what_is_no_part_of_an_article_is_left_out_of_the_pages_of_mediawiki() -> None:
    for mark in (
        "<body class='mediawiki ltr'>",
        "<div id=mw-content-text>",
        "<div class=mw-parser-output>",
        "<meta name=generator content='MediaWiki 1.43.0'>",
    ):
        page = read_page(mark + OF_WIKIS)
        assert page.text == "History\n\nLater\n\nThe end."
        assert page.headings == (Heading(0, 2, "History"), Heading(9, 2, "Later"))
        assert not page.is_disambiguation
    inside = (
        "a<sup class=reference>[1]</sup>b <div class=navbox><table><tr><td>c<p>d</table><h2>e</h2></div>f"
    )
    assert read_page(f"<div class=mw-body>{inside}").text == "ab\n\nf"
    cells = "<tr><th>A<th>B<tr><td>1<div class=thumb>x</div><td>2<table class=infobox><tr><th>x<td>y</table>"
    assert read_page(f"<div class=mw-body><table>{cells}</table>").text == "A: 1; B: 2."
    last = read_page("<div class=mw-body><p>One.<h2>Notes</h2><table><tr><td>x<td><h2>Two</h2>y")
    assert last.text == "One."


def test_an_article_of_mediawiki_whose_title_names_sources_is_kept() -> None:
    page = read_page(
        "<div class=mw-body><h1>Bibliography</h1><p>Lists of books.<h2>Sources</h2><p>A book.</div>"
    )
    assert page.text == "Bibliography\n\nLists of books."


def test_headings_of_mediawiki_are_kept_whatever_words_their_ids_have() -> None:
    headings = "<h2><span class=mw-headline id=metadata>metadata</span></h2>a<h2 id=thumb>thumb</h2>b"
    sources = "<h2 id=references>references</h2>c"
    assert read_page(f"<div class=mw-body>{headings}{sources}").text == "metadata\n\na\n\nthumb\n\nb"


def test_a_listing_of_wikitext_does_not_make_a_page_of_mediawiki() -> None:
    assert read_page("<pre class='code mediawiki'>x</pre><h2>References</h2>y").text == "x\n\nReferences\n\ny"


def test_pages_of_other_programs_keep_what_they_call_metadata_references_and_sources() -> None:
    blocks = [
        "Author: Ada",
        "History",
        "Old.",
        "References",
        "A book.",
        "More",
        "Another.",
        "Later",
        "The end.",
    ]
    assert read_page("<!--htdig_noindex-->" + OF_WIKIS + "<!--/htdig_noindex-->").text.split("\n\n") == blocks


def test_links_of_headings_to_themselves_are_no_text() -> None:
    page = read_page('<h2>Use<a href="#use" title="Link">#</a></h2>In C<a href="/sharp">#</a>, # is a sign.')
    assert page.text == "Use\n\nIn C#, # is a sign."
    assert page.headings == (Heading(0, 2, "Use"),)


def test_a_picture_has_a_title_of_its_own() -> None:
    page = read_page("<svg><title>no</title></svg><h1>Yes</h1>x")
    assert page == Page("", "Yes\n\nx", (Heading(0, 1, "Yes"),)) and page.main_heading == "Yes"


def test_a_title_that_was_never_closed_is_text() -> None:
    page = read_page("<title>T " + "word " * 500)
    assert page.title == "" and page.text.split() == ["T", *["word"] * 500]


def test_odd_markup_is_read_as_in_html5() -> None:
    assert read_page("x<![5]>y").text == "xy"
    assert (
        read_page("a &lt; b &amp c &#xd800; &#0; é\U0001f600").text == "a < b & c \ufffd \ufffd é\U0001f600"
    )
    assert read_page("a < b<p>c</body>d</html>e").text.split() == ["a", "<", "b", "c", "de"]
    assert read_page("<!-- <p> -- > -->a<!--b").text == "a"
    assert read_page('<p title="a > b">c').text == "c"


words = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="<&"), min_size=1
)
junk = st.lists(
    st.sampled_from("<button> </b> <noscript> <b> </div> <div> <![x]> <!--x--> </p>".split()), max_size=4
)


@given(st.lists(st.tuples(words, junk), min_size=1, max_size=6))
def test_paragraphs_between_any_markup_are_in_the_text(pieces: list[tuple[str, list[str]]]) -> None:
    source = "".join(f"<p>{word}</p>{''.join(odd)}>" for word, odd in pieces)
    text = read_page(source).text
    for word, _ in pieces:
        assert word.strip(">") in text


FURNITURE = [
    *("<footer>{}</footer>", "<aside>{}</aside>", "<button>{}</button>", "<noscript>{}</noscript>"),
    *("<div hidden>{}</div>", "<div style='color: red; DISPLAY:none'>{}</div>", "<p aria-hidden=true>{}</p>"),
    *("<ul hidden=hidden><li>{}</ul>", "<aside role=complementary>{}</aside>", "<span hidden>{}</span>"),
]


@pytest.mark.parametrize("element", FURNITURE)
@pytest.mark.parametrize("inside", ["no", "<p>no</p><h4>no</h4>"])
def test_what_is_around_the_content_or_not_shown_is_left_out(element: str, inside: str) -> None:
    if "<p" in element:
        inside = "no"
    assert read_page(f"<p>One.</p>{element.format(inside)}<div>Two.</div>").text == "One.\n\nTwo."


@pytest.mark.parametrize("element", ["<i aria-hidden=true>{}</i>", "<div hidden>{}</div>", "<svg>{}</svg>"])
def test_a_heading_or_link_begins_after_the_hidden_sign_before_it(element: str) -> None:
    page = read_page(
        f"<h2>{element.format('*')} Setup</h2>Read <a href=/x>{element.format('*')}the docs</a>."
    )
    assert page.headings == (Heading(0, 2, "Setup"),)
    assert [(one.address, page.text[one.start :]) for one in page.anchors] == [("/x", "the docs.")]
    empty = read_page(f"<h2>{element.format('*')}</h2>One. <a href=/x>{element.format('*')}</a>Two.")
    assert not empty.headings and not empty.anchors


@pytest.mark.parametrize(
    "unseen",
    [
        *(
            "<!-- <footer> -->",
            "<!--><!-- <footer> --!>",
            "<script>f('<footer>')</script>",
            "<title>The <footer></title>",
        ),
        *("<STYLE>/* <footer> */</style>", "<textarea><footer></textarea>", "<iframe><footer></iframe>"),
    ],
)
def test_tags_in_comments_and_scripts_are_no_tags(unseen: str) -> None:
    assert "Copyright" not in read_page(f"{unseen}<p>One.</p><footer>Copyright</footer>").text
    assert "Two." in read_page(f"<p>One.</p><footer>{unseen.replace('footer', '/footer')}<p>Two.").text


@pytest.mark.parametrize("element", FURNITURE)
@pytest.mark.parametrize("text", ["Yes.", "<a href=x>Yes.</a>"])
def test_a_page_does_not_become_empty(element: str, text: str) -> None:
    assert read_page(f"<title>T</title>{element.format(text)}").text == "Yes."


def test_a_page_that_scripts_show_is_kept() -> None:
    app = f"<div id=app style='display: none'><h1>Port</h1>{'<p>It is 9555.' * 9}</div>"
    for page in (f"<div>Loading</div>{app}", f"<main>Loading{app}</main><footer>Copyright</footer>"):
        assert read_page(page).text.startswith("Loading\n\nPort\n\nIt is 9555.")
        assert "Copyright" not in read_page(page).text


@pytest.mark.parametrize(
    "element", ["<footer>{}</footer>", "<div hidden>{}</div>", "<noscript>{}</noscript>"]
)
def test_long_furniture_beside_a_short_main_element_is_left_out(element: str) -> None:
    main = "<main><p>The port is 9555.</p></main>"
    assert (
        read_page(f"{main}{element.format('<p>We ship all over the world.' * 90)}").text
        == "The port is 9555."
    )


def test_notes_on_the_text_are_kept() -> None:
    for page in (
        "<article><aside>One.</aside><p>Two.<footer>Three.</footer></article>",
        "<main><section>One.</section><aside>Two.</aside>Three.</main>",
        "<p>One.<blockquote>Two.<footer>Three.</footer></blockquote>",
        "<p>One.<aside role=doc-footnote>Two.</aside><aside epub:type='footnote'>Three.</aside>",
        "One.<div hidden=until-found>Two.</div><div role=tabpanel hidden>Three.</div>",
    ):
        assert read_page(page).text.split() == ["One.", "Two.", "Three."]


def test_a_button_that_is_a_heading_or_in_a_sentence_is_text() -> None:
    page = read_page("<h2><button>How?</button></h2><p>Press <button>Send</button> twice.")
    assert page.text == "How?\n\nPress Send twice." and page.headings == (Heading(0, 2, "How?"),)
    assert read_page("<h1>Vec <button>Copy path</button></h1>x").text == "Vec\n\nx"


def test_a_button_beside_other_text_of_an_item_is_text() -> None:
    for item in ("<ul><li>{}</ul>", "<dl><dt>x<dd>{}</dl>", "<table><tr><td>{}</table>"):
        for words in (
            "<button>Save</button> stores <b>it</b>.",
            "<i><button>Save</button></i> <b>stores</b> it.",
            "<button>Save</button><svg><text>x</text></svg><br> stores it.",
            "<button><i hidden>*</i>Save</button><i aria-hidden=true>!</i> stores <button>it</button>.",
        ):
            text = read_page(f"<div>One.</div>{item.format(words)}<div>Two.</div>").text
            assert " ".join(text.replace("x\n\n", "").split()) == "One. Save stores it. Two."
        for words in (
            "<button>Save</button> <button>Send</button>",
            "<i hidden>x<button>y</button></i><button>z</button>",
        ):
            text = read_page(f"<div>One.</div>{item.format(words)}<div>Two.</div>").text
            assert text.replace("x\n\n", "") == "One.\n\nTwo."
    rows = "<tr><th>A<th>B<tr><td>1<td><button>Edit</button><tr><td>2<td>3 <button>km</button>"
    assert read_page(f"<table>{rows}</table>").text == "A: 1.\n\nA: 2; B: 3 km."


def test_a_button_that_unfolds_text_is_text() -> None:
    for attribute in ("aria-expanded=false", "aria-controls=a"):
        page = f"<div><button {attribute}>How?</button><div id=a>So.</div></div><button>Copy</button>"
        assert read_page(page).text == "How?\n\nSo."


def test_the_text_of_a_page_is_that_of_its_main_element() -> None:
    page = "<h1>Harbor</h1><div>Accept cookies?</div>{}<div>Copyright</div>"
    for main in (
        "<main><h2>Ports</h2>The port is 9555.</main>",
        "<div role=main><h2>Ports</h2>The port is 9555.</div>",
        "<main><div role=main><h2>Ports</h2></div>The port is 9555.</main>",
        "<nav>x<main><h2>Ports</h2>The port is <a href=x>9555.</a></main>",
    ):
        read = read_page(page.format(main))
        assert read.text == "Ports\n\nThe port is 9555." and read.headings == (Heading(0, 2, "Ports"),)


def test_a_page_without_title_has_that_of_the_only_first_heading_beside_its_main_element() -> None:
    header = "<header><h1>Pump <a href=x>P200</a></h1></header>"
    care = "<main><h2>Care</h2>Oil it.</main>"
    page = read_page(header + care)
    assert page.title == "Pump P200" and page.text == "Care\n\nOil it."
    assert read_page(care + header).title == "Pump P200"
    assert read_page("<title>T</title>" + header + care).title == "T"
    for other in (header * 2 + care, header + care.replace("h2", "h1"), f"<footer>{header}</footer>{care}"):
        assert read_page(other).title == "" and read_page(other).main_heading == "Care"


@pytest.mark.parametrize(
    "page",
    [
        "<main><p> </main>One.<p>Two.",
        "<main>One.</main><main>Two.</main>",
        "<main>One.</main><p>Two." + "<p>More." * 9,
        "<table><tr><td>One.<tr><td><main>Two.</main></table>",
    ],
)
def test_a_page_is_read_whole_if_it_is_built_otherwise_than_its_main_element_says(page: str) -> None:
    assert read_page(page).text.replace("\n", " ").split()[:2] == ["One.", "Two."]


def test_a_list_of_links_with_headings_and_paragraphs_is_navigation() -> None:
    bar = "<div role=navigation><h1><a>harbor</a></h1><p>Contents</p><ul><li><a>Installation</a><li><a>Reference</a></ul></div>"
    assert read_page(f"<p>One.{bar}<p>Two.").text == "One.\n\nTwo."


NUMBERS = [
    '<table><tr><td class="linenos"><pre>1\n2</pre></td><td class="code"><pre>{}</pre></td></tr></table>',
    '<table><tbody><tr><td class="rouge-gutter gl"><pre class="lineno">1\n2\n</pre></td><td><pre>{}</pre></table>',
    '<pre><span class="ln"> 1</span>{}</pre>',
    '<table><tr><td class="lntd"><pre><span class="lnt">1\n</span></pre></td><td class="lntd"><pre>{}</pre></table>',
]


@pytest.mark.parametrize("code", NUMBERS)
def test_numbers_of_lines_of_program_code_are_no_text(code: str) -> None:
    assert read_page(f"<p>One.{code.format('apt update')}<p>Two.").text == "One.\n\napt update\n\nTwo."
    assert read_page("<table><tr><td class=gutter>5 km<td>b</table>").text == "5 km | b"


def test_program_code_keeps_its_indentation() -> None:
    page = read_page(
        "<p>  One.\n  Two.</p><pre>a:\n  b:  1\n\n\tc <b>\n\xa0 d</b>\n<i>\n</i>  <i>e</i>\n</pre>"
    )
    assert page.text == "One. Two.\n\na:\n  b: 1\n\n    c\n  d\n\n  e"
    cells = "<table><tr><td><pre>if x:\n  y</pre></table>"
    assert read_page(cells).text == "if x:\n  y"
    linked = read_page("<pre>a\n  <a href=x>b</a></pre>")
    assert linked.text == "a\n  b" and linked.anchors[0].start == 4
    assert read_page(f"<pre>a\n{' ' * 1_000}b</pre>").text == f"a\n{' ' * 40}b"
    assert read_page("a\x1fb<p>\x1f c").text == "a b\n\nc"


def test_characters_that_html_does_not_allow_are_no_marks_of_headings_and_links() -> None:
    words = "a \x039\x03 b \x024 c"
    page = read_page(f"<title>{words}</title><p>{words}<a>{words}</a>")
    assert page.title == "a 9 b 4 c" and not page.headings and not page.anchors
    unclosed = read_page(f"<title>{words * 500}")
    assert unclosed.text.startswith("a 9 b 4 c") and not unclosed.headings and not unclosed.anchors


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["a", "b c", "{}", "# d"])), min_size=1))
def test_every_line_of_code_has_its_indentation(code: list[tuple[int, str]]) -> None:
    source = "\n".join(" " * indent + words for indent, words in code)
    assert read_page(f"<p>x<pre>{source}</pre>").text == f"x\n\n{source}"


def test_a_hidden_column_is_not_in_the_sentences_of_a_table() -> None:
    row = "<tr><{0} style='display:none'>7</{0}><{0}>{1}</{0}><{0}>{2}</{0}></tr>"
    assert (
        read_page(f"<table>{row.format('th', 'A', 'B')}{row.format('td', 1, 2)}</table>").text
        == "A: 1; B: 2."
    )


ALABASTER = """<title>Start - harbor</title><body><div class="document"><div class="body" role="main"><section><h1>Start<a
class="headerlink" href="#start">¶</a></h1><p>Written by Ada.</p></section></div><div class="sphinxsidebar" role="navigation">
<h1 class="logo"><a href="i">harbor</a></h1><search id="searchbox" style="display: none" role="search"><form><input></form>
</search><h3>Navigation</h3><p class="caption"><span>Contents:</span></p><ul><li><a href="a">Installation</a></li></ul></div>
</div><div class="footer">©2024, Ada. | Powered by <a href="s">Sphinx 8.1</a> | <a href="t">Page source</a></div></body>"""
MATERIAL = """<title>Start - harbor</title><body><div><a href="#i" class="md-skip">Skip to content</a></div><header><nav>
<a>harbor</a></nav><div class="md-search-result__meta">Initializing search</div></header><main class="md-main">
<div class="md-sidebar"><nav class="md-nav"><label>harbor</label><ul><li>Home</li></ul></nav></div>
<article><h1 id="i">Start<a class="headerlink" href="#i">¶</a></h1><p>Written by Ada.</p></article></main>
<footer class="md-footer"><nav><a>Previous: Home</a></nav><div>Made with <a>Material for MkDocs</a></div></footer></body>"""
HELP = """<title>Start - harbor</title><body><div class="cookies">We use cookies. <button>Accept all</button></div><header><a
class="skip" href="#main">Skip</a><nav><a href="/">Home</a></nav></header><div class="sidebar"><h3>Related articles</h3><ul><li>
<a href=a>Reefers</a></li></ul></div><main id="main"><article><h1>Start</h1><p>Written by Ada.</p></article></main><aside><h4>
Newsletter</h4><p>Never miss a sailing!</p></aside><footer><p>Copyright 2024. All rights reserved.</p></footer></body>"""


@pytest.mark.parametrize("page", [ALABASTER, MATERIAL, HELP])
def test_of_a_page_of_a_manual_the_article_is_read(page: str) -> None:
    assert read_page(page)[:3] == ("Start - harbor", "Start\n\nWritten by Ada.", (Heading(0, 1, "Start"),))


@pytest.mark.parametrize("page", [ALABASTER, MATERIAL, HELP])
def test_a_document_does_not_repeat_the_heading_that_is_in_its_title(page: str, tmp_path: Path) -> None:
    (tmp_path / "start.html").write_text(page, encoding="utf-8")
    (document,) = read_documents([str(tmp_path)])
    assert (document.title, document.text) == ("Start - harbor", "Written by Ada.")


SHAPES = [
    *("<aside><p>x", "<div hidden>x</div>", "<main>x</main>", "<pre><i class=ln>1", "<footer>x", "<button>"),
    *("<script>", "<script></script>", "<title", "<!-- --", "<!-->", "<xmp></"),
    *("<li><button>x</button>", "<button>x</button>", "<td>a<button>x</button> "),
    "<a ",
    "<div>x",
    "<b>",
    "<p><b>",
    "</p>",
    "<!--",
    "<![",
    "&amp",
    "&",
    "<li>",
    "<table><a>",
    "<",
    'a="',
    "<td>",
]


def seconds(source: str) -> float:
    begin = time.process_time()
    with suppress(PageError):
        read_page(source)
    return time.process_time() - begin


@pytest.mark.parametrize("shape", SHAPES)
def test_time_is_linear_in_hostile_pages(shape: str) -> None:
    one, four = (shape * (size // len(shape)) for size in (20_000, 80_000))
    if shape.startswith("a="):
        one, four = (f"<p {' '.join(f'a{n}=1' for n in range(size // 6))}>" for size in (20_000, 80_000))
    seconds(one)
    assert min(seconds(four) for _ in range(2)) < 8 * min(seconds(one) for _ in range(2)) + 0.05


def test_elements_nested_too_deeply_are_refused_before_the_page_was_read() -> None:
    assert read_page("<div>" * (DEEPEST - 2) + "deep").text == "deep"
    with pytest.raises(PageError, match="nested over 1,000 deep"):
        read_page("<div>" * DEEPEST + "deep")
    assert seconds("<div></p>" * 200_000) < 0.5  # with a tree or without, each end tag would look through all
