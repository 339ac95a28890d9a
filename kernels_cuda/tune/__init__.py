"""Which candidate serves a call: timed in turns at the calls that are made anyway, and kept."""
