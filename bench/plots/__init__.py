"""Plots of the results: svg.py draws, charts.py says what. Standard library only."""
