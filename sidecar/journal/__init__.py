"""The decision log: every decision with all that it was made from, and what reads it again.

`writer` keeps it beside a running sidecar, off the request path; `reader` gives its events back;
`playback` decides them again; `verify`, `compare` and `explain` say what came of it.
"""
