"""Tables of plain text."""


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{first:<{widths[0]}}"
        + "".join(f"{cell:>{width + 4}}" for cell, width in zip(cells, widths[1:], strict=True))
        for first, *cells in rows
    ]


def p_value(p: float) -> str:
    """Of a test, as it stands in a table."""
    return "<.001" if p < 0.001 else f"{p:.3f}"
