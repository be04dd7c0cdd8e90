"""Prints tables, and draws plots where matplotlib is installed."""

from types import ModuleType

Table = list[tuple[str, ...]]  # the first row is the head


def align(rows: Table, left: int = 2) -> str:
    """Rows of text as a table: the first row is the head, the first `left` columns are aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def pyplot() -> ModuleType | None:
    """matplotlib.pyplot, drawing into files; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
