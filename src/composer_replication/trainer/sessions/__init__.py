"""A run's conversations as batches: read, render, cut into windows, check hints, compute references.

rendering       read sessions with their sites and pairs; render each as token ids, with the items of each channel
dataset         the data set: windows of rendered sessions, their control, and the sessions of a warm-up
stored_windows  a window in compact form, and the micro-batch made of several
proof           the hint check of all sites, stored as `hint_proof.jsonl`
reference       log-probs of pairs under the initial model, stored as `ref_logprobs.safetensors`
phases          progress of the work before the first step, and what an interrupt would lose
"""
