"""What is done with a run and its weights: hand them out, talk to them, see whether a machine can do the work.

In reading order:

    trained    which weights are meant, their start weights and licence
    merge      an adapter folded into its start weights, and proved
    serving    GGUF, Ollama, vLLM
    cards      what weights were made of, and what is known of them
    data_sets  good turns and conversations for other trainers
    hub        weights to the hub, where that is asked for
    chat       before and after, asked the same
    trackers   an evaluation in trackio or W&B
    doctor     what a machine has and lacks
"""
