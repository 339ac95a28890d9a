"""Techniques that the docs name and nothing shipped uses, beside what is shipped: README.md says which."""
