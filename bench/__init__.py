"""Speed of the simulator, as ratios taken in one run; see ``python -m bench --help``."""
