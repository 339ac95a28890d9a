"""Between the server and the page: a run's messages, the page's requests, the user's files."""
