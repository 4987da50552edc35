"""Turn a run's conversations into batches: read, render, cut into windows, check hints, and compute references.

rendering  read sessions with their sites and pairs; render each as token ids, with the items of each channel
dataset    the data set: windows of rendered sessions in compact form, the control, and the sessions for a warm-up
proof      the hint check of all sites, stored as `hint_proof.jsonl`
reference  log-probs of pairs under the initial model, stored as `ref_logprobs.safetensors`
phases     progress of the work before the first step, and what an interrupt would lose
"""
