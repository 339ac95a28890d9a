"""A graph that is queued or open: read from links and values before anything runs."""
