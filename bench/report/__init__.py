"""The pages: tables, plots and claims from the files of results. Standard library only."""
