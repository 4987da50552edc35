"""Compare the model before and after training on held-out sessions: log-probabilities, sampled actions, a verdict.

arms           the models that are compared (before, after, controls), loaded one at a time
scored_calls   the held-out sessions, the calls scored at each error site, and their log-probs
sampling       actions that each model samples at held-out states, judged and compared with the session
vllm_sampling  sampling with vLLM, where it is installed
questions      what every model is asked: log-probs, actions, losses on good turns and code, math, token gaps
figures        means over sites with intervals over sessions
verdict        whether the model got better or worse, and the record of it in evaluation.json
models         which models are compared, and with which settings
evaluate       the whole evaluation in order
report/        a run as HTML and markdown pages
ablation/      experiments: arms times seeds with equal budgets
"""
