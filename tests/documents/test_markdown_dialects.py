"""Markdown of MkDocs, GitHub, Docusaurus and Hugo: notes, tabs, containers, shortcodes and footnotes."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realm.documents.formats.markdown_dialects import as_commonmark
from realm.documents.formats.records import Limits, Record
from realm.documents.formats.text_files import markdown


def read(path: Path, source: str) -> Record:
    path.write_text(source)
    (record,) = markdown(path, Limits(headings=True))
    return record


TABS = """# Tariffs

## Prices

=== "Iberia"

    | Container | Price |
    |---|---|
    | dry | 3320 |

    === "By rail"

        | Container | Price |
        |---|---|
        | dry | 70 |

===+ "Benelux"
\t| Container | Price |
\t|---|---|
\t| dry | 880 |

    ```sh
    === "no tab"
        echo 1
    ```

## Terms

Pay in May.
"""


def test_a_row_of_a_table_in_a_tab_has_the_title_of_the_tab(tmp_path: Path) -> None:
    record = read(tmp_path / "a.md", TABS)
    assert record.title == "Tariffs"
    assert [one.title for one in record.sections] == [
        "Tariffs > Prices",
        "Tariffs > Terms",
    ]
    assert record.text.split("\n\n")[:7] == [
        *("Prices", "Iberia", "Container: Iberia, dry; Price: 3320."),
        *("By rail", "Container: Iberia, By rail, dry; Price: 70."),
        *("Benelux", "Container: Benelux, dry; Price: 880."),
    ]
    assert '=== "no tab"' in record.text


def test_text_after_tabs_is_no_part_of_the_last_tab(tmp_path: Path) -> None:
    record = read(tmp_path / "a.md", '# T\n## S\n=== "A"\n\n    Text A\n\nAfter tabs')
    assert [one.title for one in record.sections] == ["T > S"]
    assert record.text == "S\n\nA\n\nText A\n\nAfter tabs"
    assert read(tmp_path / "setup.md", '=== "A"\n\n    | B |\n    |---|\n    | c |').title == "setup"


def test_tables_in_tabs_are_tables_whatever_their_signs(tmp_path: Path) -> None:
    tables = """=== "A|B"
    B | C
    --|:-:
    1 | 2

    | a | no table |

    - | D | E |
      |---|---|
      | 3 | 4 |

    > | F | G |
    > |---|---|
    > | 5 | 6 |

| H | I |
|---|---|
| 7 | 8 |
"""
    assert read(tmp_path / "a.md", tables).text.split("\n\n") == [
        *("A|B", "B: A|B, 1; C: 2.", "| a | no table |", "D: 3; E: 4.", "F: 5; G: 6.", "H: 7; I: 8."),
    ]
    long = read(tmp_path / "a.md", f'=== "{"A" * 200}"\n    | B | C |\n    |---|---|\n    | 1 | 2 |\n').text
    assert long.endswith("A\n\nB: 1; C: 2.")


def test_bodies_of_notes_are_text_and_not_program_code(tmp_path: Path) -> None:
    source = """# Limits

1. Open the port.

    !!! warning inline end "The *quota*"

        It is **12**.

        ??? tip
            Ask `Ada`.

    Still the first step.

???+ note "Long

!!! danger ""
    - one
    - two

!!! Do not run this as root.

!!! note "No body"

After.
"""
    record = read(tmp_path / "a.md", source)
    assert record.text.split("\n\n") == [
        *("Open the port.", "The quota", "It is 12.", "Ask Ada.", "Still the first step."),
        *('???+ note "Long', "one", "two", "!!! Do not run this as root.", '!!! note "No body"', "After."),
    ]


def test_a_fence_ends_with_the_block_around_it(tmp_path: Path) -> None:
    source = '=== "A"\n\n    ```sh\n    ls\n\nAfter *it*.\n\n> ```\n> x\n> ```\n\n- ```\n  y\n  ```\n\n!!! note\n    z\n'
    record = read(tmp_path / "a.md", source)
    assert record.text.split("\n\n") == ["A", "ls", "After it.", "x", "y", "z"]


def test_signs_of_alerts_containers_and_shortcodes_are_no_text(tmp_path: Path) -> None:
    source = """> [!IMPORTANT]
> Ask Ada.

> [!info]- The port
> It is 9555.

:::tip Docusaurus
One.
::::warning[Two *words*]
Three.
::::
:::

::: details {open}
Four.
:::

{{< hint info >}}
Five, see [six]({{< ref "six.md" >}}).
{{% /notice %}}

```go
{{< raw >}}
:::tip
```
"""
    assert read(tmp_path / "a.md", source).text.split("\n\n") == [
        *("Ask Ada.", "The port", "It is 9555.", "Docusaurus", "One.", "Two words", "Three.", "Four."),
        *("Five, see six.", "{{< raw >}}\n:::tip"),
    ]


def test_a_note_that_is_an_aside_of_html_is_kept(tmp_path: Path) -> None:
    assert read(tmp_path / "a.md", "One.\n\n<aside>\nTwo.\n</aside>\n").text == "One.\n\nTwo."


def test_three_colons_that_nothing_closes_are_text(tmp_path: Path) -> None:
    assert read(tmp_path / "a.md", "x\n\n::: NOTE\n\ny").text == "x\n\n::: NOTE\n\ny"


def test_code_in_a_line_stays_as_it_is(tmp_path: Path) -> None:
    source = 'Write `{{< hint >}}` or ``a ` [^1]``[^1] {{< tab "`x" >}}here ` and [^1]`[^1].\n\n[^1]: Note'
    text = read(tmp_path / "a.md", source).text
    assert text == "Write {{< hint >}} or a ` [^1] here and [^1].\n\nNote"


def test_signs_of_a_fence_in_indented_code_begin_no_fence(tmp_path: Path) -> None:
    source = """Write:

    ```sh

Then {{< a >}}this.

1.  Run

    ```sh
    {{< b >}}
    ```

    - Or

        ```sh
        {{< c >}}
        ```

    In {{< d >}}May.

Text.

    ~~~

{{< e >}}End.
"""
    assert read(tmp_path / "a.md", source).text.split("\n\n") == [
        *(
            "Write:",
            "```sh",
            "Then this.",
            "Run",
            "{{< b >}}",
            "Or",
            "{{< c >}}",
            "In May.",
            "Text.",
            "~~~",
            "End.",
        ),
    ]


def test_a_dotted_name_behind_colons_is_no_container(tmp_path: Path) -> None:
    source = "::: realm.text.corpus\n    options: x\n\n::: tip\nOne.\n:::\n"
    assert read(tmp_path / "a.md", source).text == "::: realm.text.corpus options: x\n\nOne."


def test_footnotes_are_paragraphs_and_their_numbers_no_text(tmp_path: Path) -> None:
    source = "One.[^1] A set [^abc].\n\n[^1]: Written by *Ada*.\n\n    In May.\n\n[^2]: https://a.example\n[^3]: x\n\nEnd.[^2]"
    assert read(tmp_path / "a.md", source).text.split("\n\n") == [
        *("One. A set [^abc].", "Written by Ada.", "In May.", "https://a.example", "x", "End."),
    ]


SIGNS = (
    *(
        "\n",
        "    ",
        "\t",
        "!!! note",
        ' "T"',
        '=== "T"',
        "??? a",
        ":::",
        "::: a",
        "\n:::\n",
        "> ",
        "[!x]",
        "```",
    ),
    *("~~~", "[^1]", "[^1]: ", "{{< a >}}", "# ", "===", "- ", "1. "),
)


@example(["!!! note", "\n", "    ", "```", "\n"])
@example(["::: a", "\n", ":::", "\n:::\n"])
@given(st.lists(st.sampled_from(SIGNS), max_size=30))
def test_every_word_but_kinds_of_notes_is_kept(drawn: list[str]) -> None:
    source = "".join(one if one.endswith("\n") else f"{one}w{n}e " for n, one in enumerate(drawn))
    kinds = re.findall(r"(?:note|a|:::+)(w\d+e)", source)
    kept = re.findall(r"w\d+e", as_commonmark(source))
    assert {*kept, *kinds} >= set(re.findall(r"w\d+e", source))


@given(st.lists(st.sampled_from(["", "a", "    b", "# c", "```", "- d", "> e", "| f |", "---"]), max_size=12))
def test_text_without_signs_of_a_dialect_stays_as_it_is(lines: list[str]) -> None:
    source = "\n".join(lines)
    assert as_commonmark(source) == source


SHAPES = [
    *(
        "!!! a\n",
        "!!! a\n    ",
        '=== "',
        '=== "a"\n    x\n',
        "??? a" + " " * 50,
        "!!! a a ",
        "!!! a-",
        "> ",
        "> [!",
    ),
    *(
        ":::",
        "::: a[",
        "{{<",
        "{{< ",
        "[^",
        "[^1]",
        "[^1]:\n",
        "```",
        "- ```\n",
        "` `` {{< a",
        "`[^1]",
        "`" * 40 + "{{< a >}} `",
        "- ",
        "\t| a |\n\t|-|\n",
        "\t",
        "\n",
        "1) ",
        "***",
        "~~~ \n",
    ),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("end", ["", "!", "\n:::"])
def test_time_is_linear_in_hostile_text(shape: str, end: str) -> None:
    def seconds(size: int) -> float:
        begin = time.process_time()
        as_commonmark(shape * (size // len(shape)) + end)
        return time.process_time() - begin

    seconds(50_000)
    assert min(seconds(200_000) for _ in range(2)) < 8 * min(seconds(50_000) for _ in range(2)) + 0.05
