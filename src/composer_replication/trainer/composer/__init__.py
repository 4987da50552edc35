"""Parts of the composer trainer, which adds two channels to TRL's own.

generation  TRL's generation step with error sites, groups drawn again, a penalty in the advantage
logged      logged traces beside rollouts: which comes next, and what it holds
channels    the terms of both channels in a micro-step, and what is logged of them
state       what a resumed run needs
"""
