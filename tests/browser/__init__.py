"""The pack in the real front end: a Chromium without a window clicks through what a user clicks through."""
