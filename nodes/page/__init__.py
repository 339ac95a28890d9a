"""Between the server and the page: what a run tells, what the page asks for, the user's files."""
