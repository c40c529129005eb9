"""Numbers and names as a terminal shows them: pure."""

import math
import unicodedata


def clean(text: str, most: int = 256) -> str:
    """What a peer named, made harmless: nothing in it can steer a terminal.

    Controls, directions of writing, separators and what has no width become question marks.

    most: characters kept.
    """
    return "".join(
        char if char.isprintable() and not unicodedata.combining(char) else "?"
        for char in text[:most]
    )


def count(value: float | None) -> str:
    """At most five characters: 999, 1.0k, 812k, 1.0M."""
    if value is None:
        return "-"
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.0f}{suffix}" if scaled >= 99.95 else f"{scaled:.1f}{suffix}"
    return f"{value:.0f}"


def rate(value: float | None) -> str:
    """A second: 0.3, 12.5, 1.2k."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 99.95 else count(value)


def percent(part: float | None) -> str:
    """A share of 1: 0.4%, 87%."""
    if part is None:
        return "-"
    value = 100 * part
    return f"{value:.1f}%" if 0 < value < 9.95 else f"{value:.0f}%"


def micros(value: float | None, last_bound: float = 0.0) -> str:
    """Microseconds as 12us, 3.4ms; beyond the last bucket as `>20ms`."""
    if value is None:
        return "-"
    if math.isinf(value):
        return ">" + micros(last_bound)
    return f"{value:.0f}us" if value < 999.5 else f"{value / 1000:.3g}ms"


def seconds(value: float | None) -> str:
    """An age, at most five characters: 0.2s, 59s, 12m, 3h, 4d."""
    if value is None:
        return "-"
    for size, suffix in ((86400, "d"), (3600, "h"), (60, "m")):
        if value >= 2 * size:
            return f"{value / size:.0f}{suffix}"
    return f"{value:.0f}s" if value >= 9.95 else f"{value:.1f}s"
