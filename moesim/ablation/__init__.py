"""What the tables of a sweep show: read back, and cut into what each picture draws.

What belongs here: choosing rows and putting them in order. What does not: running, computing metrics, drawing.
"""

from moesim.ablation.grouping import provenance
from moesim.ablation.kinds import KINDS, Kind, select_panels
from moesim.ablation.panels import Panel
from moesim.ablation.tables import SweepTables, load_tables, only_where

__all__ = [
    "KINDS",
    "Kind",
    "Panel",
    "SweepTables",
    "load_tables",
    "only_where",
    "provenance",
    "select_panels",
]
