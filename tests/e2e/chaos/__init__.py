"""Faults at random on real processes: run with ``make chaos``, see ``__main__``."""
