"""The one error tree.

::

    MoesimError
    ├── ConfigError            a setting, spec or override is wrong
    ├── TraceFormatError       a trace or result file is short, foreign, newer or inconsistent
    ├── UnknownNameError       a name that no registry or catalog holds
    ├── UnsupportedScenarioError   legal settings that a backend or trace cannot serve
    └── InvariantError         the model broke one of its own laws: a fault of this package

Every message names the field, the value, the allowed range and the file, and says what to do.
"""

import difflib
from collections.abc import Iterable


class MoesimError(Exception):
    """Base of all errors that a user can meet; the command line turns it into exit code 2."""


class ConfigError(MoesimError, ValueError):
    """A setting, spec or override has an illegal value."""


class TraceFormatError(MoesimError, ValueError):
    """A file is not a complete, consistent trace of a known schema version."""


class UnknownNameError(MoesimError, LookupError):
    """A name is in no registry or catalog."""

    @classmethod
    def nearest(cls, kind: str, name: str, known: Iterable[str]) -> "UnknownNameError":
        """Build the error that suggests the nearest known name.

        Parameters
        ----------
        kind : str
            What was looked up, e.g. ``"eviction policy"``.
        name : str
            What the user wrote.
        known : iterable of str
            Every legal name.
        """
        names = sorted(known)
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return cls(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")


class UnsupportedScenarioError(MoesimError):
    """A backend, policy or trace cannot serve what the scenario asks for."""


class InvariantError(MoesimError, RuntimeError):
    """A law of the model was broken; this is a fault of moesim, not of its input."""
