"""A model and a batch in, `LossComponents` out: the forward passes, the hinted teachers, and the composed loss.

compose        `compose_loss`: the documented arguments, the channels of a batch, and the weighted total
channels       each channel's loss from hidden rows, wherever they come from; the settings of channels 2 and 3
row_weighting  how much each erring token counts, the contrast with an unrelated hint, and the hinted teachers' rows
reference      reference log-probs for channel 3
hint_proof     the hint check of each site, and whether a model reacts to hints at all
model_head     a causal LM as a body that gives rows and a head that gives logits
attention/     hidden rows of a token tree
distributed    work inside the forward of DDP and FSDP2; a model without dropout, or below its adapter
fingerprint    what reference log-probs were computed with
smoke_chat     `build_batch`: one small fixed chat as a batch for all three channels
"""
