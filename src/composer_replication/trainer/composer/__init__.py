"""Parts of the composer trainer, which adds two channels to TRL's own.

generation      TRL's generation step with error sites, groups drawn again, a penalty in the advantage
logged_batches  logged traces beside rollouts: which comes next, and what it holds
heed_gate       channel 2 rests until a model is seen to heed hints
channels        the terms of both channels in a micro-step
loss            a micro-step's loss, and what is logged of it
resume_state    what a resumed run needs
"""
