"""Parts of the composer trainer, which adds two channels to TRL's own.

generation      TRL's generation step with error sites, groups drawn again, a penalty in the advantage
logged          logged traces beside rollouts
logged_sampler  which logged item comes next
channels        the terms of both channels in a micro-step
figures         what is logged of them
state           what a resumed run needs
"""
