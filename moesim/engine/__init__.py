"""The SimPy reference model of DESIGN section 4: what timelines and doubts are settled with."""
