"""What a model's files, its run and the server are put through, and how one tells that nothing of it is left behind."""
