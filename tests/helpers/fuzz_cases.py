"""How many cases: a short part in the default run, 2,000 in all with `make exhaustive`."""

SHORT = 10
WHOLE = {"runs": 1400, "files": 400, "values": 200}
