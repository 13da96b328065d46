"""Makes questions about rows of tables, on which the span reader of realm-small learns to choose a cell.

    python recipes/table_questions.py KB rows.jsonl row_questions.jsonl

The tables are made up: of the columns and templates below, of made-up numbers and codes, and of the names that were tagged in
the passages of a knowledge base. Each row becomes a passage {"id", "title", "text"} in the form in which `realm` reads the rows
of a table, and each question a line {"id", "question", "answers", "passage_id"}. The answer is a cell of the row.
"""

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realm.documents.formats.rows import sentence_of
from realm.files import write_json_lines
from realm.store.knowledge_base import KnowledgeBase

TABLES = 3000
QUESTIONS_OF_A_TABLE = 3
LONGEST_NAME = 40
SAMPLE = 30_000
"""Passages from which names are taken."""

Names = Mapping[str, Sequence[str]]
"""Label of the tagger -> names."""
Maker = Callable[[random.Random, Names], str]


class Column(NamedTuple):
    """A column: the names that it can have, what makes its cells, and questions about a cell, with {key} for the row."""

    names: tuple[str, ...]
    make: Maker
    asked: tuple[str, ...] = ()
    """Besides the general questions, of which {column} is the name without its unit."""
    finds_row: bool = False
    """Whether a cell is so special that it can name its row in a question."""


GENERAL = (
    "what is the {column} of {key}?",
    "what {column} does {key} have?",
    "{key} {column}",
    "which {column} has {key}?",
)
"""Questions for every column."""
YEAR_ASKED = (
    "what was the {title} of {key} in {column}?",
    "how much was {key} in {column}?",
    "{key} in {column}",
)
"""Questions for the column of a year."""
ROW_ASKED = (
    "which {key} has {column} {value}?",
    "which {key} belongs to {value}?",
    "{column} {value}: which {key}?",
)
"""Questions for the name of a row."""


def main(kb: Path, rows: Path, questions: Path) -> None:
    """Writes the passages and the questions."""
    generator = random.Random(0)
    names = names_of(KnowledgeBase.open(kb), generator)
    tables = [table(str(number), names, generator) for number in range(TABLES)]
    write_json_lines(rows, (row for made in tables for row in made.passages))
    asked = (
        question(f"{number}-{again}", made, generator)
        for number, made in enumerate(tables)
        for again in range(QUESTIONS_OF_A_TABLE)
    )
    write_json_lines(questions, filter(None, asked))


def names_of(kb: KnowledgeBase, generator: random.Random) -> Names:
    """The tagged names of a sample of passages, by label."""
    found: dict[str, set[str]] = defaultdict(set)
    numbers = generator.sample(range(len(kb)), min(SAMPLE, len(kb)))
    for passage in kb.passages(sorted(numbers)):
        for start, end, label in passage.spans:
            name = passage.text[start:end]
            if len(name) <= LONGEST_NAME and not set(name) & set(":;\n"):
                found[label].add(name)
    return {label: sorted(all_of_it) for label, all_of_it in found.items()}


def tagged(*labels: str) -> Maker:
    """A name with one of these labels."""
    return lambda generator, names: generator.choice(names[generator.choice(labels)])


def one_of(*words: str) -> Maker:
    """One of these words."""
    return lambda generator, _: generator.choice(words)


def number(low: float, high: float, digits: int = 0, *forms: str) -> Maker:
    """A number, in one of the `forms`, such as "{} EUR"; large numbers have commas in half of the cells."""

    def make(generator: random.Random, _: Names) -> str:
        value = generator.uniform(low, high) if digits else generator.randint(int(low), int(high))
        text = f"{value:,.{digits}f}" if generator.random() < 0.5 else f"{value:.{digits}f}"
        return generator.choice(forms or ("{}",)).format(text)

    return make


def code(generator: random.Random, _: Names) -> str:
    """A number of a part, such as "TX-204"."""
    letters = "".join(generator.choices("ABCDEFGHKLMNPRSTUVWXZ", k=generator.randint(1, 3)))
    return f"{letters}{generator.choice(('-', '', ' '))}{generator.randint(1, 9999)}"


def host(generator: random.Random, _: Names) -> str:
    """The name of a machine."""
    kind = generator.choice(("web", "db", "mail", "build", "cache", "proxy", "backup", "log"))
    return f"{kind}-{generator.randint(1, 40):02}"


def address(generator: random.Random, _: Names) -> str:
    """An address of a network."""
    return ".".join(str(generator.randint(1, 254)) for _ in range(4))


def version(generator: random.Random, _: Names) -> str:
    """A version of a program."""
    return ".".join(str(generator.randint(0, 20)) for _ in range(generator.randint(2, 3)))


def day(generator: random.Random, _: Names) -> str:
    """A date in one of several forms."""
    year, month, of_month = generator.randint(1950, 2027), generator.randint(1, 12), generator.randint(1, 28)
    months = "January February March April May June July August September October November December".split()
    return generator.choice(
        (
            f"{year}-{month:02}-{of_month:02}",
            f"{of_month} {months[month - 1]} {year}",
            f"{months[month - 1]} {year}",
            f"{year}",
        )
    )


def clock(generator: random.Random, _: Names) -> str:
    """A time of day."""
    return f"{generator.randint(0, 23):02}:{generator.choice((0, 15, 30, 45)):02}"


def product(generator: random.Random, names: Names) -> str:
    """A made-up product, with or without a description."""
    thing = generator.choice(
        "pump,filter,sensor,cable,battery,valve,router,printer,lamp,chair,desk,motor,gasket,display,drill,"
        "jacket,bicycle,tent,kettle,camera,probe,hose,switch,relay,charger,keyboard".split(",")
    )
    word = generator.choice(names["ORG"]).split()[0]
    more = generator.choice(
        (
            "",
            f" {generator.randint(1, 900)}",
            f", {generator.randint(2, 60)} pieces",
            f" {generator.randint(1, 90)} m",
        )
    )
    return generator.choice((f"{word} {thing}{more}", f"{thing}{more}", f"{word}{more}".capitalize()))


KEYS = (
    Column(("Product", "Item", "Article", "Description", "Model", "Name"), product),
    Column(("Part", "Part number", "Code", "ID", "Order", "Ticket", "SKU"), code),
    Column(("Name", "Employee", "Person", "Member", "Speaker"), tagged("PERSON")),
    Column(("City", "Site", "Office", "Location", "Branch", "Region", "Country", "Place"), tagged("GPE")),
    Column(
        ("Company", "Customer", "Organisation", "Supplier", "Partner", "Team", "Department"), tagged("ORG")
    ),
    Column(("Host", "Server", "Machine", "Node"), host),
    Column(("Title", "Course", "Project", "Event", "Exhibit"), tagged("WORK_OF_ART", "EVENT", "PRODUCT")),
    Column(("Bridge", "Building", "Station", "Plant", "Room"), tagged("FAC", "LOC")),
)
COLUMNS = (
    Column(
        (
            "Owner",
            "Contact",
            "Manager",
            "Responsible",
            "Assigned to",
            "Contact person",
            "Head",
            "Lead",
            "Author",
            "Coach",
        ),
        tagged("PERSON"),
        (
            "who is the {column} of {key}?",
            "who is responsible for {key}?",
            "whom do I ask about {key}?",
            "who is the {column} for {key}?",
        ),
        True,
    ),
    Column(
        ("Location", "City", "Place", "Country", "Site", "Headquarters", "Origin"),
        tagged("GPE"),
        ("where is {key}?", "in which {column} is {key}?", "where can I find {key}?"),
        True,
    ),
    Column(
        ("Supplier", "Vendor", "Manufacturer", "Customer", "Operator", "Maker", "Sponsor", "Employer"),
        tagged("ORG"),
        (
            "who is the {column} of {key}?",
            "which company is the {column} of {key}?",
            "who stands behind {key}?",
        ),
        True,
    ),
    Column(
        (
            "Date",
            "Start",
            "Since",
            "Opened",
            "Released",
            "Founded",
            "Installed",
            "Last inspection",
            "Due",
            "Expires",
            "Joined",
            "End",
        ),
        day,
        (
            "when was {key} {column}?",
            "when is {key} {column}?",
            "since when is there {key}?",
            "what is the date of {key}?",
            "{column} of {key}: when?",
        ),
        True,
    ),
    Column(
        ("Price", "Price (EUR)", "Cost", "Unit price", "Fee", "Price USD", "List price"),
        number(2, 9000, 2, "{}", "{} EUR", "${}"),
        (
            "how much is {key}?",
            "what does {key} cost?",
            "how much does {key} cost?",
            "what is the price of {key}?",
            "how expensive is {key}?",
        ),
    ),
    Column(
        ("Price", "Budget", "Price NOK", "Salary", "Revenue", "Turnover", "Rent"),
        number(40, 900_000),
        ("how much is the {column} of {key}?", "what does {key} cost?", "how much {column} does {key} have?"),
    ),
    Column(
        ("Weight (kg)", "Weight", "Mass (g)", "Net weight (kg)"),
        number(0.1, 90, 1),
        ("how much does {key} weigh?", "how heavy is {key}?", "what is the weight of {key}?"),
    ),
    Column(
        (
            "Lead time (weeks)",
            "Delivery (days)",
            "Duration (min)",
            "Warranty (months)",
            "Notice (weeks)",
            "Duration (h)",
        ),
        number(1, 60),
        ("how long is the {column} of {key}?", "what is the {column} of {key}?", "how long does {key} take?"),
    ),
    Column(
        ("Length (m)", "Height (cm)", "Width (mm)", "Depth (m)", "Range (km)", "Diameter (mm)"),
        number(1, 900, 1),
        ("how long is {key}?", "what is the {column} of {key}?", "how large is {key}?"),
    ),
    Column(
        (
            "Stock",
            "Quantity",
            "Pieces",
            "Seats",
            "Employees",
            "Members",
            "Visitors",
            "Beds",
            "Packing unit",
            "Participants",
        ),
        number(1, 4000),
        (
            "how many {column} does {key} have?",
            "how many {key} are there?",
            "how many {column} are there in {key}?",
            "how many of {key} do we have?",
        ),
    ),
    Column(
        (
            "CPU",
            "Cores",
            "Memory (GB)",
            "RAM",
            "Disk (TB)",
            "Port",
            "Power (W)",
            "Voltage",
            "Capacity (l)",
            "Temperature",
        ),
        number(1, 512),
        ("how much {column} does {key} have?", "which {column} does {key} use?"),
    ),
    Column(
        ("Version", "Firmware", "Release"),
        version,
        ("which version of {key} do we use?", "what is the current {column} of {key}?"),
    ),
    Column(
        ("IP", "IP address", "Address"),
        address,
        ("what is the address of {key}?", "under which {column} is {key}?"),
        True,
    ),
    Column(("Host", "Server"), host, ("on which {column} is {key}?", "where does {key} run?"), True),
    Column(
        ("Number", "Serial number", "Part number", "Contract", "Room", "Order number", "Invoice", "Bay"),
        code,
        ("which {column} belongs to {key}?", "under which {column} is {key} listed?"),
        True,
    ),
    Column(
        ("Status", "State", "Priority", "Risk", "Level", "Class", "Type"),
        one_of(
            "open",
            "closed",
            "active",
            "in use",
            "retired",
            "planned",
            "high",
            "medium",
            "low",
            "on hold",
            "critical",
            "done",
        ),
        ("what is the {column} of {key}?", "what {column} is {key}?"),
    ),
    Column(
        ("Colour", "Material", "Size", "Finish"),
        one_of(
            "red",
            "dark blue",
            "green",
            "steel",
            "titanium",
            "oak",
            "black",
            "large",
            "XL",
            "small",
            "cotton",
            "white",
            "brass",
        ),
        ("what {column} is {key}?", "which {column} does {key} have?", "of what is {key} made?"),
    ),
    Column(
        ("Opens", "Closes", "Departure", "Arrival", "Begins"),
        clock,
        ("when does {key} {column}?", "at what time is the {column} of {key}?"),
    ),
    Column(
        ("Discount", "VAT", "Share", "Efficiency", "Utilisation"),
        number(1, 99, 0, "{} %", "{}%"),
        ("how high is the {column} of {key}?",),
    ),
    Column(
        ("Description", "Product", "Device", "Content"),
        product,
        ("what is {key}?", "what is behind {key}?"),
        True,
    ),
)
TITLES = (
    "Inventory", "Price list", "Contacts", "Suppliers", "Spare parts", "Sites", "Overview", "Fleet", "Staff", "Orders",
    "Servers", "Results", "Rates", "Courses", "Customers", "Equipment", "Projects", "Schedule", "Assets", "Report", "Terms",
    "Data sheet",
)  # fmt: skip


class Table(NamedTuple):
    """A made-up table. The first column names the rows."""

    title: str
    columns: tuple[Column, ...]
    headings: list[str]
    cells: list[list[str]]
    passages: list[dict[str, Any]]
    """One for each row."""


def table(name: str, names: Names, generator: random.Random) -> Table:
    """A table of 3 to 7 rows."""
    columns, headings = columns_of(generator)
    cells: list[list[str]] = []
    wanted = generator.randint(3, 7)
    while len(cells) < wanted:
        row = [column.make(generator, names).strip() for column in columns]
        if all(row) and row[0].casefold() not in {other[0].casefold() for other in cells}:
            cells.append(row)
    title = generator.choice(TITLES)
    part = ""
    if generator.random() < 0.6:
        part = f" > {generator.choice(names['GPE'] if generator.random() < 0.5 else TITLES)}"
    order = list(range(len(headings)))
    if generator.random() < 0.15:  # the column of names is not always the first one
        generator.shuffle(order)
    shown = [headings[i] for i in order]
    texts = (sentence_of(shown, [row[i] for i in order]) for row in cells)
    passages = [
        {"id": f"table-{name}-{number}", "title": title + part, "text": text}
        for number, text in enumerate(texts)
    ]
    return Table(title, columns, headings, cells, passages)


def columns_of(generator: random.Random) -> tuple[tuple[Column, ...], list[str]]:
    """Columns and their headings, which are different."""
    columns = (generator.choice(KEYS), *generator.sample(COLUMNS, generator.randint(2, 6)))
    if generator.random() < 0.15:  # a column for each year
        first = generator.randint(1990, 2024)
        years = (Column((str(first + n),), value_of_year) for n in range(generator.randint(2, 5)))
        columns = (columns[0], *years)
    headings = [generator.choice(column.names) for column in columns]
    if generator.random() < 0.2:
        headings = [heading.lower() for heading in headings]
    if len({heading.casefold() for heading in headings}) < len(headings):
        return columns_of(generator)
    return columns, headings


def value_of_year(generator: random.Random, _: Names) -> str:
    """A value of a year, such as millions of turnover."""
    if generator.random() < 0.5:
        return f"{generator.uniform(1, 400):.1f}"
    return str(generator.randint(10, 9000))


def question(name: str, table: Table, generator: random.Random) -> dict[str, Any] | None:
    """A question about a cell of a random row; None if the question is true of several rows."""
    row = generator.randrange(len(table.cells))
    cells, headings = table.cells[row], table.headings
    asked, given = (generator.randrange(1, len(headings)) for _ in range(2))
    if table.columns[given].finds_row and given != asked and generator.random() < 0.2:
        # The name of the row is asked for: "which product has the supplier Acme?"
        if [other[given] for other in table.cells].count(cells[given]) > 1:
            return None
        form = generator.choice(ROW_ASKED)
        text = form.format(key=headings[0].lower(), column=headings[given].lower(), value=cells[given])
        answer = cells[0]
    else:
        column = table.columns[asked]
        forms = column.asked if column.asked and generator.random() < 0.7 else GENERAL
        if column.make is value_of_year:
            forms = YEAR_ASKED
        heading = headings[asked].partition(" (")[0]  # without its unit
        if not heading.isupper():
            heading = heading.lower()
        text = generator.choice(forms).format(key=cells[0], column=heading, title=table.title.lower())
        answer = cells[asked]
        if answer == cells[0]:
            return None
    if generator.random() < 0.2:
        text = text[0].upper() + text[1:]
    passage = table.passages[row]["id"]
    return {"id": f"row-{name}", "question": text, "answers": [answer], "passage_id": passage}


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python recipes/table_questions.py KB ROWS QUESTIONS")
    main(*map(Path, sys.argv[1:]))
