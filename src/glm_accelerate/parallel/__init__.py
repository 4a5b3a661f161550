"""Several processes as one trainer: applied to a model from outside, and to nothing else."""
