"""What all engines are held to: twenty recorded steps, one fixed batch, and the same losses written out plainly.

Nothing here needs an engine. `recorded_steps` and `plain_losses` need torch, transformers and safetensors alone, so the
environment of any engine can read them; `trl_steps` needs TRL, and `record_twenty_steps.py` writes the record anew.

recorded_steps     the record: ids, masks, rewards, log-probs, sites and what came out of each step
recorded_episodes  the same rollouts as episodes, with their messages
plain_losses       GRPO and channel 2 by their formulas, on whole logits, and a step with them
trl_steps          our trainer in TRL: the run that is recorded, and the same run on recorded rollouts
"""
