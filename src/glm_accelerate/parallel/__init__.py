"""Several processes as one trainer. The model does not know of it."""
