"""The oracle's H2D link: a list of copy dicts, moved forward one completion at a time."""


class Link:
    """One copy at a time, never preempted.

    Parameters
    ----------
    discipline : "fifo" or "demand_first"
    launch_ns : int
        Launch overhead of every copy.
    start_latency_ns : int
        Added to a copy that finds the link idle.
    """

    def __init__(self, discipline: str, launch_ns: int, start_latency_ns: int) -> None:
        self.discipline = discipline
        self.launch_ns = launch_ns
        self.start_latency_ns = start_latency_ns
        self.copies: list[dict] = []  # all of them, in request order
        self.waiting: list[dict] = []
        self.started: list[dict] = []  # in start order
        self.dropped: list[dict] = []
        self.running: dict | None = None

    def request(self, now: int, kind: str, transfer_ns: int, **facts: int) -> dict:
        """Ask for a copy at `now`; an idle link starts it at once."""
        self.advance(now)
        copy = {
            "copy": len(self.copies),
            "kind": kind,
            "promoted": False,
            "transfer_ns": transfer_ns,
            "requested_ns": now,
            "started_ns": -1,
            "landed_ns": -1,
            "launch_ns": 0,
            **facts,
        }
        self.copies.append(copy)
        if self.running is None:
            self._start(copy, now, self.start_latency_ns + self.launch_ns)
        else:
            self.waiting.append(copy)
        return copy

    def advance(self, now: int) -> None:
        """Let every copy land that ends by `now`, each followed at once by the next one in line."""
        while self.running is not None and self.running["landed_ns"] <= now:
            freed_ns = self.running["landed_ns"]
            self.running = None
            if self.waiting:
                copy = min(self.waiting, key=self._place_in_line)
                self.waiting.remove(copy)
                self._start(copy, freed_ns, self.launch_ns)

    def landing_ns(self, copy: dict) -> int:
        """Return when a requested copy lands if nothing more is requested before."""
        while copy["started_ns"] < 0:
            self.advance(self.running["landed_ns"])
        return copy["landed_ns"]

    def promote(self, copy: dict) -> None:
        """Put a waiting prefetch into the demand class, at the place of its own request."""
        copy["promoted"] = True

    def drop(self, copy: dict) -> None:
        """Forget a waiting copy: it never runs."""
        self.waiting.remove(copy)
        self.dropped.append(copy)

    def owed_ns(self, now: int) -> int:
        """Rest of the running copy plus every waiting copy."""
        owed = self.running["landed_ns"] - now if self.running is not None else 0
        return owed + sum(self.launch_ns + copy["transfer_ns"] for copy in self.waiting)

    def _start(self, copy: dict, now: int, launch_ns: int) -> None:
        copy["started_ns"] = now
        copy["launch_ns"] = launch_ns
        copy["landed_ns"] = now + launch_ns + copy["transfer_ns"]
        self.running = copy
        self.started.append(copy)

    def _place_in_line(self, copy: dict) -> tuple[bool, int]:
        is_prefetch = copy["kind"] == "prefetch" and not copy["promoted"]
        return (self.discipline == "demand_first" and is_prefetch, copy["copy"])
