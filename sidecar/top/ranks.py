"""The ranks of an instance as lines of a table: pure."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from sidecar.top import text
from sidecar.top.rates import Picture, RankFlow
from sidecar.top.source import Instance, Rank

RUNNING, WAITING, FLIGHT = "green", "yellow", "blue"
BAR = (("█", RUNNING), ("▒", WAITING), ("░", FLIGHT))
LEAST_BAR, MOST_BAR = 6, 60


@dataclass(frozen=True)
class Column:
    """A column of numbers. rank: the higher, the sooner it goes where there is no room."""

    title: str
    width: int
    rank: int
    cell: Callable[[Rank, RankFlow], str]


COLUMNS = (
    Column("load", 5, 0, lambda rank, flow: text.count(rank.load)),
    Column("run", 5, 2, lambda rank, flow: text.count(rank.running)),
    Column("wait", 5, 1, lambda rank, flow: text.count(rank.waiting)),
    Column("fly", 4, 4, lambda rank, flow: text.count(rank.in_flight)),
    Column("KV used", 11, 7, lambda rank, flow: _tokens(rank)),
    Column("KV", 5, 3, lambda rank, flow: text.percent(_filled(rank))),
    Column("age", 5, 2, lambda rank, flow: text.seconds(rank.report_age_seconds)),
    Column("req/s", 6, 5, lambda rank, flow: text.rate(flow.requests)),
    Column("cache", 6, 6, lambda rank, flow: text.percent(flow.cache_hit)),
)


def _filled(rank: Rank) -> float | None:
    if rank.tokens is None or not rank.capacity_tokens:
        return None
    return rank.tokens / rank.capacity_tokens


def _tokens(rank: Rank) -> str:
    if rank.tokens is None:
        return "-"
    return f"{text.count(rank.tokens)}/{text.count(rank.capacity_tokens or None)}"


class RankTable:
    """Draws the ranks of a picture on one scale, in columns that fit `width` cells."""

    def __init__(self, picture: Picture, width: int) -> None:
        self.picture = picture
        loads = [rank.load for one in picture.status.instances for rank in one.ranks]
        self.most = max(loads, default=0)
        columns = list(COLUMNS)

        def used() -> int:
            return 5 + sum(column.width + 1 for column in columns)

        while len(columns) > 1 and used() + 1 + LEAST_BAR > width:
            columns.remove(max(columns, key=lambda column: column.rank))
        self.columns = columns
        self.bar = max(0, min(MOST_BAR, width - used() - 1))

    def heading(self) -> Text:
        """Names of the columns."""
        line = Text(" rank", "dim")
        for column in self.columns:
            line.append(f" {column.title:>{column.width}}")
            if column.title == "load" and self.bar:
                line.append(" " + self._legend())
        return line

    def _legend(self) -> str:
        names = zip(BAR, ("running", "waiting", "in flight"), strict=True)
        words = " ".join(f"{char} {name}" for (char, _), name in names)
        return (words if len(words) <= self.bar else "").ljust(self.bar)

    def rows(self, instance: Instance, room: int | None) -> list[Text]:
        """The ranks in order, or the busiest of them and how many more there are."""
        ranks = instance.ranks
        if not ranks:
            return [Text("      no rank yet", "dim")]
        if room is None or len(ranks) <= room:
            return [self._row(instance, rank) for rank in ranks]
        busiest = sorted(ranks, key=lambda rank: (-rank.load, rank.rank))
        shown, hidden = busiest[: room - 1], busiest[room - 1 :]
        more = f"      {len(hidden)} more ranks, load {hidden[-1].load} to {hidden[0].load}"
        return [*(self._row(instance, rank) for rank in shown), Text(more, "dim")]

    def _row(self, instance: Instance, rank: Rank) -> Text:
        flow = self.picture.ranks.get((instance.instance, rank.rank), RankFlow())
        line = Text(f"{rank.rank:>5}", "" if rank.live else "red strike")
        for column in self.columns:
            line.append(f" {column.cell(rank, flow):>{column.width}}", self._style(column, rank))
            if column.title == "load" and self.bar:
                line.append(" ")
                self._draw(line, rank)
        return line

    def _style(self, column: Column, rank: Rank) -> str:
        if not rank.live:
            return "dim"
        age = rank.report_age_seconds
        if column.title == "age" and (age is None or age > self.picture.status.stale_seconds):
            return "bold red"
        return ""

    def _draw(self, line: Text, rank: Rank) -> None:
        """Running, waiting and in flight side by side, on a scale that all ranks share."""
        parts = (rank.running or 0, rank.waiting or 0, rank.in_flight)
        cells, end, total = 0, 0, 0
        for part, (char, style) in zip(parts, BAR, strict=True):
            total += part
            end = round(self.bar * total / max(self.most, self.bar / 2, 1))
            end = min(self.bar, max(end, cells + (part > 0)))
            line.append(char * (end - cells), style)
            cells = end
        if rank.live:
            line.append(" " * (self.bar - cells))
        else:
            line.append(" down"[: self.bar - cells].ljust(self.bar - cells), "red")
