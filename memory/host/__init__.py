"""A model's layers in RAM: pages read from the file or registered, and the pinned ring that bytes
pass through."""
