"""From batches to a better model: what a training loop needs around the objective."""
