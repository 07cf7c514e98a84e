"""The compute stream's schedule: when each stage begins and ends, and the sleep that stretches it to its duration."""

import select
import time
from collections.abc import Callable
from dataclasses import dataclass

# A sleeping thread wakes about so much late on an idle machine, a half of it for the timer's slack.
WAKING_NS = 150_000


def sleep_until(deadline_ns: int) -> None:
    """Sleep until shortly before a reading of ``time.perf_counter_ns``, then let others run until it is there."""
    left_ns = deadline_ns - time.perf_counter_ns() - WAKING_NS
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
    while time.perf_counter_ns() < deadline_ns:
        # Lets go of the interpreter's lock each time, as a plain loop would not; a sleep of 0 takes half of the above.
        select.select((), (), (), 0)


def settled(due_ns: int, largest_lag_ns: int) -> int:
    """Give the time at which something that was due is taken to have happened: when due, or now if that is too late."""
    now_ns = time.perf_counter_ns()
    return due_ns if now_ns - due_ns <= largest_lag_ns else now_ns


@dataclass(slots=True)
class Pacing:
    """How well a paced run kept its schedule.

    Attributes
    ----------
    n_stages : int
        Stages that had a duration to keep.
    n_overruns : int
        Stages and waits that ended later than they were due by more than the lag that is allowed.
    overrun_ns, largest_overrun_ns : int
        By how much the schedule was moved for them, in all and at most.
    link_overrun_ns : int
        By how much the emulated link's schedule was moved in all.
    """

    n_stages: int = 0
    n_overruns: int = 0
    overrun_ns: int = 0
    largest_overrun_ns: int = 0
    link_overrun_ns: int = 0


class Pacer:
    """The end of the last stage, and how the next one ends.

    Parameters
    ----------
    synchronize : callable
        Waits for the device's compute stream.
    is_paced : bool
        Whether stages are stretched to their durations.
    largest_lag_ns : int
        How late a stage may end before the schedule is moved.
    """

    def __init__(self, synchronize: Callable[[], None], *, is_paced: bool, largest_lag_ns: int) -> None:
        self._synchronize = synchronize
        self._is_paced = is_paced
        self._largest_lag_ns = largest_lag_ns
        self.pacing = Pacing()
        self.stamp_ns = time.perf_counter_ns()

    def restart(self) -> None:
        """Let a stage begin now, whatever was before."""
        self._synchronize()
        self.stamp_ns = time.perf_counter_ns()

    def end_stage(self, duration_ns: int) -> int:
        """End a stage that began at the last stamp: its work has been started by now.

        Parameters
        ----------
        duration_ns : int
            How long it lasts in a paced run.

        Returns
        -------
        int
            The new stamp. A paced stage ends when due, and now only where its work took too long.
        """
        self._synchronize()
        if not self._is_paced:
            self.stamp_ns = time.perf_counter_ns()
            return self.stamp_ns
        due_ns = self.stamp_ns + int(duration_ns)
        sleep_until(due_ns)
        self.pacing.n_stages += 1
        return self._settle(due_ns)

    def end_wait(self, landed_ns: int) -> int:
        """End a wait for something that landed at a known time; give the new stamp."""
        if self._is_paced:
            return self._settle(max(self.stamp_ns, landed_ns))
        self.stamp_ns = time.perf_counter_ns()
        return self.stamp_ns

    def _settle(self, due_ns: int) -> int:
        """Set the stamp to what was due, or move it."""
        self.stamp_ns = settled(due_ns, self._largest_lag_ns)
        if self.stamp_ns > due_ns:
            late_ns = self.stamp_ns - due_ns
            self.pacing.n_overruns += 1
            self.pacing.overrun_ns += late_ns
            self.pacing.largest_overrun_ns = max(self.pacing.largest_overrun_ns, late_ns)
        return self.stamp_ns
