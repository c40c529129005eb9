"""One frame of `top`, line by line: pure."""

import textwrap
from dataclasses import dataclass

from rich.text import Text

from sidecar.top import text
from sidecar.top.ranks import RankTable
from sidecar.top.rates import Picture
from sidecar.top.source import Instance, Status, name_and_share

WARN, DIM, BOLD = "bold red", "dim", "bold"
# Below this a frame would say nothing.
LEAST_WIDTH, LEAST_HEIGHT = 20, 4


@dataclass(frozen=True)
class Size:
    """Cells of the terminal. height None: as many lines as there is to say."""

    width: int
    height: int | None = None


def frame(picture: Picture | None, size: Size, url: str, trouble: str = "") -> list[Text]:
    """The lines of a frame, none wider than the terminal.

    trouble: why the sidecar does not answer; the picture is the last that was had then.
    """
    width = max(size.width, LEAST_WIDTH)
    height = None if size.height is None else max(size.height, LEAST_HEIGHT)
    lines = _trouble(url, trouble, width) if trouble else []
    if picture is None:
        lines += [] if trouble else [Text(f"asking {text.clean(url)} ...", DIM)]
    else:
        lines += _head(picture, url, width)
        room = None if height is None else height - len(lines) - 1
        lines += _body(picture, width, room)
    if height is not None:
        lines = lines[: height - 1]
    lines.append(_foot(picture, live=height is not None))
    for line in lines:
        line.no_wrap = True
        line.truncate(width)
    return lines


def _foot(picture: Picture | None, *, live: bool) -> Text:
    words = ["q quit"] if live else []
    if picture is not None and picture.span:
        words.append(f"rates, shares and p50, p99: the last {picture.span:.0f} s")
    return Text("   ".join(words), DIM)


def _trouble(url: str, trouble: str, width: int) -> list[Text]:
    words = f"no sidecar at {text.clean(url)}: {trouble}"
    return [Text(line, WARN) for line in textwrap.wrap(words, width)]


def _head(picture: Picture, url: str, width: int) -> list[Text]:
    status, flow = picture.status, picture.flow
    last = status.query_time.last_bound
    named = [Text.assemble((text.clean(status.policy), BOLD), f" version {status.policy_version}")]
    if not status.last_reload_ok:
        named.append(Text("last reload refused", WARN))
    named += _trials(status)
    named.append(Text(f"sidecar {text.clean(status.version)}", DIM))
    if status.uptime_seconds is not None:
        named.append(Text(f"up {text.seconds(status.uptime_seconds)}", DIM))
    named.append(Text(text.clean(url), DIM))
    figures = (
        ("", text.rate(flow.decisions) + "/s"),
        ("hit ", text.percent(flow.hit)),
        ("spill ", text.percent(flow.spill)),
        ("fallback ", text.percent(flow.fallback)),
        ("bypass ", text.percent(flow.bypass)),
        ("p50 ", text.micros(flow.p50_us, last)),
        ("p99 ", text.micros(flow.p99_us, last)),
    )
    told = [Text.assemble((name, DIM), (value, BOLD)) for name, value in figures]
    return [*_packed(named, width), *_packed(told, width)]


def _packed(parts: list[Text], width: int) -> list[Text]:
    """The parts side by side, on as many lines as it takes."""
    lines = [parts[0]]
    for part in parts[1:]:
        if lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1] = Text("  ").join((lines[-1], part))
        else:
            lines.append(part)
    return lines


def _trials(status: Status) -> list[Text]:
    """Policies beside the one in force."""
    roles = (("canary", status.canary), ("shadow", status.shadow))
    return [
        Text(f"{role} {text.clean(name_and_share(policy))}", "cyan")
        for role, policy in roles
        if policy is not None
    ]


def _body(picture: Picture, width: int, room: int | None) -> list[Text]:
    """Instances and their ranks in `room` lines; what does not fit is counted."""
    instances = picture.status.instances
    if not instances:
        return [Text("no instance: no SGLang server with the hook has connected", "yellow")]
    table = RankTable(picture, width)
    if room is None:
        blocks = [[_title(picture, one), *table.rows(one, None)] for one in instances]
        return [table.heading(), *(line for block in blocks for line in block)]
    room -= 1
    # An instance takes its title, its busiest rank and the number of the others at least.
    shown = instances if 3 * len(instances) <= room else instances[: max(1, (room - 1) // 3)]
    lines, left = [table.heading()], room - (len(shown) < len(instances))
    for index, one in enumerate(shown):
        fair = left // (len(shown) - index)
        block = [_title(picture, one), *table.rows(one, max(1, fair - 1))]
        left -= len(block)
        lines += block
    if len(shown) < len(instances):
        hidden = len(instances) - len(shown)
        lines.append(Text(f"{hidden} of {len(instances)} instances hidden", DIM))
    return lines


def _title(picture: Picture, instance: Instance) -> Text:
    about, hook = instance.about, instance.hook
    line = Text(text.clean(instance.instance), BOLD)
    for key in ("sglang", "hook"):
        if key in about:
            line.append(f"  {key} {text.clean(about[key])}", DIM)
    waits = picture.round_trips.get(instance.instance)
    if hook is not None and waits is not None and waits[1] is not None:
        p50, p99 = (text.micros(wait, hook.round_trip.last_bound) for wait in waits)
        line.append(f"  hook waits p50 {p50} p99 {p99}", DIM)
    if hook is not None and hook.breaker_open:
        line.append("  breaker open", WARN)
    return line
