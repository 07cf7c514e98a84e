"""Results as tables and as one JSON object, each with where its numbers come from.

What belongs here: choosing, naming and laying out numbers. What does not: computing them, printing, drawing.
"""

from moesim.report.entries import Entry, Floor, Role, entry, floors
from moesim.report.notes import notes, provenance_lines
from moesim.report.pairs import prefetch_effects
from moesim.report.tables import report_json, report_table

__all__ = [
    "Entry",
    "Floor",
    "Role",
    "entry",
    "floors",
    "notes",
    "prefetch_effects",
    "provenance_lines",
    "report_json",
    "report_table",
]
