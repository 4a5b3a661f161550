"""A run as a page in a browser, live or as one file."""
