"""Reports as text."""

from collections.abc import Sequence
from typing import Any

Row = Sequence[Any]


def table(rows: Sequence[Row], indent: str = "  ") -> list[str]:
    """Columns as wide as they need; the first is text, the others stand to the right."""
    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        return []
    widths = [max(len(row[n]) for row in cells) for n in range(len(cells[0]))]
    return [
        indent
        + "  ".join(
            text.ljust(width) if n == 0 else text.rjust(width)
            for n, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def cell(value: Any) -> str:
    """One value."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def verification(told: dict[str, Any]) -> str:
    """`replay` without a policy."""
    lines = _log(told["log"])
    if not told["differ"]:
        lines.append(f"{cell(told['compared'])} decisions compared: each is made again")
    else:
        lines.append(f"{cell(told['compared'])} decisions compared: {cell(told['differ'])} differ")
        names = ("at", "instance", "rank", "reason", "replayed_rank", "replayed_reason")
        lines += table([names, *([str(one[n]) for n in names] for one in told["first"])])
    return "\n".join(lines + _ends(told))


def comparison(told: dict[str, Any]) -> str:
    """`replay` with a policy."""
    logged, replayed, policy = told["logged"], told["replayed"], told["policy"]
    lines = _log(told["log"])
    was = ", ".join(f"{name} {cell(n)}" for name, n in told["policies"].items())
    params = " ".join(f"{name}={value}" for name, value in policy["params"].items())
    lines += [f"logged: {was}", f"replayed: {policy['name']} {params}".rstrip()]
    share = told["agreement"]
    if share is not None:
        lines.append(f"same rank: {share:.2%} of {cell(told['compared'])} requests")
    rows: list[Row] = [("", "logged", "replayed")]
    names = [name for name in logged if name not in ("requests", "reasons")]
    rows += [(name.replace("_", " "), logged[name], replayed[name]) for name in names]
    reasons = dict.fromkeys([*logged["reasons"], *replayed["reasons"]])
    rows += [
        (f"reason {reason}", logged["reasons"].get(reason, 0), replayed["reasons"].get(reason, 0))
        for reason in reasons
    ]
    return "\n".join(lines + table(rows) + _ends(told))


def history(told: dict[str, Any]) -> str:
    """`explain --key`."""
    lines = _log(told["log"])
    requests = told["requests"]
    if not requests:
        return "\n".join([*lines, f"key {told['key_hash']}: no request in the log"])
    lines.append(f"key {told['key_hash']}: {cell(len(requests))} requests")
    names = ("at", "time", "instance", "seq", "index", "rank", "reason", "moved", "tokens")
    rows = [[str(one[name]) if name == "seq" else one[name] for name in names] for one in requests]
    return "\n".join(lines + table([names, *rows]))


def one_decision(told: dict[str, Any]) -> str:
    """`explain` of one request."""
    place = f"request {told['index']} of {told['requests_in_query']}"
    lines = [
        f"{told['at']}  {told['time']}  {told['instance']}, query {told['seq']}, {place}",
        _request(told["request"]),
        f"went to rank {told['rank']}: {told['reason']}{_preferred(told)}",
    ]
    if "policy" in told:
        params = " ".join(f"{name}={value}" for name, value in told["params"].items())
        version = told["policy_version"]
        lines.append(
            f"decided by {told['policy']} ({told['role']}, version {version}) {params}".rstrip()
        )
    if "candidates" in told:
        lines.append("candidates, in order:")
        lines += _candidates(told)
        limits = ", ".join(f"{name} {cell(value)}" for name, value in told["limits"].items())
        lines.append(f"limits: {limits}")
    if "loads" in told:
        average = cell(told["average_requests"])
        lines.append(f"loads then (average {average} requests):")
        rows = told["loads"]
        lines += table([list(rows[0]), *(list(row.values()) for row in rows)])
    replayed = told["replayed"]
    if replayed is not None:
        lines.append(f"played back: rank {replayed['rank']}, {replayed['reason']}")
    return "\n".join(lines + [f"note: {note}" for note in told["notes"]])


def _candidates(told: dict[str, Any]) -> list[str]:
    candidates = told["candidates"]
    names = [name for name in candidates[0] if name != "rank"]
    rows: list[Row] = [["rank", *names, ""]]
    for one in candidates:
        chosen = "<- chosen" if one["rank"] == told["rank"] else ""
        rows.append([str(one["rank"]), *(one[name] for name in names), chosen])
    return table(rows)


def _preferred(told: dict[str, Any]) -> str:
    rank = told.get("preferred_rank")
    return "" if rank is None else f" (it belongs to rank {rank})"


def _request(request: dict[str, Any]) -> str:
    key = request["key_hash"]
    parts = [
        "no key" if key is None else f"key {key}",
        f"{cell(request['tokens'])} prompt tokens",
        f"{cell(request['blocks'])} block hashes",
    ]
    if request["last_rank"] is not None:
        age = request["last_age_seconds"]
        ago = "" if age is None else f", {cell(age)} s ago"
        parts.append(f"last on rank {request['last_rank']}{ago}")
    return ", ".join(parts)


def _log(log: dict[str, Any]) -> list[str]:
    lines = [
        f"{log['begins']} to {log['ends']} ({cell(float(log['seconds']))} s), "
        f"{cell(log['files'])} files, {cell(log['starts'])} starts: "
        f"{cell(log['decisions'])} decisions, {cell(log['load_reports'])} load reports"
    ]
    if log["missing"]:
        missing = ", ".join(f"{cause} {cell(n)}" for cause, n in log["missing"].items())
        lines.append(f"missing decisions: {missing}")
    return lines


def _ends(told: dict[str, Any]) -> list[str]:
    lines = [f"note: {note}" for note in told["notes"]]
    if told["policy_errors"]:
        lines.append(f"note: the policy failed {cell(told['policy_errors'])} times")
    return lines
