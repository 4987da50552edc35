"""A run's conversations as batches: read, render, window, prove, reference.

read_run            conversations with their sites and pairs, from a run directory
good_turns          which turns channel 1 may learn
rendering           one session as token ids, once: which turns, sites and pairs each channel may have
hinted_corrections  hint, then what worked: more turns for the channel 1 of a warm-up
shuffled            their control: hints of other kinds, half of the pairs turned
cutting             rendered sessions cut into windows; done again when a proof drops sites
stored_windows      a window as it waits for its step, and the micro-batch made of several
phases              how far work before the first step is, and what an interrupt would keep
proof               which hints lower the erring call, kept as `hint_proof.jsonl`
reference           log-probs of pairs under the start weights, kept as `ref_logprobs.safetensors`
dataset             all of it as one data set
"""
