"""The way between the server and the page: what a run tells it, what it asks for, and the user's files."""
