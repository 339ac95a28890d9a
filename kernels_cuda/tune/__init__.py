"""Chooses the candidate that serves a call: candidates are timed at calls that are made anyway, and
the winner is kept."""
