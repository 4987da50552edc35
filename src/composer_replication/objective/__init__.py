"""A model and a batch in, `LossComponents` out: the batch contract, the forward passes, and the composed loss."""
