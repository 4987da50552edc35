"""A model and a batch in, `LossComponents` out: the forward passes, the teachers, and the composed loss.

compose         `compose_loss`: the documented arguments, and the weighted total
knobs           what channels 2 and 3 may be told
components      what one step's loss was made of
batch_channels  a batch's channels from the passes that its rows are of; whether a pass is noisy
channels        each channel's loss from hidden rows, wherever they come from
row_weighting   how much each erring token counts, and the contrast with a wrong hint
teacher_rows    who teaches channel 2
reference       reference log-probs for channel 3
hint_proof      whether a hint does anything
heeding         whether a model heeds hints at all
model_head      a causal LM as a body that gives rows and a head that gives logits
attention       hidden rows of a token tree
adapters        a model without dropout, or below its adapter
distributed     work inside the forward of DDP and FSDP2
fingerprint     what reference log-probs were computed with
smoke_chat      `build_batch`: one small fixed chat as a batch for all three channels
"""
