"""Finds dates with a regular expression. The paper also uses a regular expression, which was not published (section 3.4)."""

from __future__ import annotations

import re

from realm.text.corpus import Span


def _date_pattern() -> re.Pattern[str]:
    s = r"(?:[^\S\n]+|[^\S\n]*\n[^\S\n]*)"  # white space, but no blank line
    dash = r"[-–]"
    month = (
        r"(?:January|February|March|April|May|June|July|August|September|October|November|December"
        r"|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec)\b\.?)"
    )
    day = r"(?:3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?"
    era = r"(?:BCE?|CE|AD|B\.\s?C\.(?:\s?E\.)?|C\.\s?E\.|A\.\s?D\.)"
    number = r"(?:\d{1,3}(?:,\d{3})+|\d{1,5})"
    year = r"(?:1\d{3}|20\d{2})"
    modifier = r"(?:(?:[Ee]arly|[Mm]id|[Ll]ate)(?:[- ]to[- ](?:mid|late))?[-– ])?"
    words = "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth"
    words += "|(?:thir|four|fif|six|seven|eigh|nine)teenth|twentieth|twenty-first"
    ordinal = rf"(?:\d{{1,2}}(?:st|nd|rd|th)|(?i:{words}))"
    # A number of four digits is a year, unless the next word is something that can be counted: "1928 soldiers".
    counted = (
        r"(?:[%°]|(?:km|cm|mm|m|ft|feet|mi|miles?|(?:kilo)?met(?:re|er)s?|sq|square|kg|g|tons?|tonnes?|lbs?"
        r"|pounds?|MW|kW|GW|Hz|MHz|GHz|K|hours?|days?|years?|people|men|women|soldiers|troops|species|times)\b)"
    )
    alone = rf"(?!{s}?-?{counted})"
    after_number = r"(?<!\d–)"
    any_year = rf"(?:{number}{s}?{era}(?!\w)|(?:AD|A\.\s?D\.){s}\d{{1,4}}|{year}{alone})"
    patterns = [
        rf"{day}(?:{s}?{dash}{s}?{day})?{s}(?:of{s})?{month}(?:,?{s}{any_year})?",  # 26 July 1928, 26–28 July
        rf"{month}{s}{day}(?:{s}?{dash}{s}?{day})?(?!\d)(?:,?{s}{any_year})?",  # July 26, 1928
        rf"{month}(?:{s}?{dash}{s}?{month})?,?{s}(?:of{s})?{any_year}",  # July 1928
        rf"(?:[Ss]pring|[Ss]ummer|[Aa]utumn|[Ff]all|[Ww]inter){s}(?:of{s})?{year}(?:{dash}\d{{2}})?",
        rf"{modifier}{ordinal}(?:{s}?(?:{dash}|,{s}|(?:and|or|to){s}(?:the{s})?){s}?{ordinal})*"
        rf"(?:{s}|-)(?:centur(?:y|ies)|millenni(?:um|a))(?:{s}{era})?",  # early 5th and 6th centuries BC
        rf"{modifier}(?:1\d|20)\d0['’]?s",  # mid-1990s
        r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4}",
        rf"{after_number}{number}(?:{s}?{dash}{s}?{number})?{s}?{era}",  # 44 BC, 753–510 BC
        rf"(?:AD|A\.\s?D\.){s}\d{{1,4}}(?:{dash}\d{{1,4}})?",  # AD 79
        rf"{after_number}{year}(?:{s}?–{s}?{year}|[-/]{year}|[-–/]\d{{2}}){alone}",  # 1914–1918, 1914–18
        rf"{after_number}{year}{alone}",
    ]
    # A date is not part of a word, a longer number, an amount of money, a fraction or a code such as F-1500.
    before = r"(?<![\w$€£¥#+])(?<!\d[.,/:-])(?<![A-Z]-)"
    after = r"(?!\w)(?![.,/:-]\d)"
    return re.compile(f"{before}(?:{'|'.join(patterns)}){after}")


DATE_PATTERN = _date_pattern()
MONTH_PATTERN = re.compile(
    r"\b(?:January|February|March|April|May|June|July|August|September|October|November|December)\b"
)


def find_dates(text: str) -> list[Span]:
    """Days, months of a year, years, decades and centuries, each as a span with the label DATE.

    >>> text = "From July 1914 until the late 1930s; 44 BC; the 19th century."
    >>> [text[span.start : span.end] for span in find_dates(text)]
    ['July 1914', 'late 1930s', '44 BC', '19th century']
    """
    return [Span(match.start(), match.end(), "DATE") for match in DATE_PATTERN.finditer(text)]
