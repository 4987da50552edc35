"""Compute the composed loss: from a model and a batch to `LossComponents`, with all forward passes and hinted teachers.

compose        `compose_loss`: the documented arguments, the channels of a batch, and the weighted total
channels       each channel's loss from hidden states, whatever pass computed them; the settings of channels 2 and 3
row_weighting  the switches for token weights, and the hidden states of the hinted teachers
reference      reference log-probs for channel 3
hint_proof     the hint check of each site, and whether a model reacts to hints at all
model_head     a causal LM split into a body that returns hidden states and a head that returns logits
attention/     hidden states of a token tree
distributed    work inside the forward of DDP and FSDP2; a model without dropout or without its adapter
fingerprint    the fingerprint of the model and tokenizer that computed stored log-probs
smoke_chat     `build_batch`: a batch for all three channels from one small fixed chat
"""
