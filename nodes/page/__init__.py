"""The traffic between server and page: a run's messages, the page's requests, the user's files."""
