"""Before against after, on held-out sessions: rows, figures with intervals over sessions, and a verdict.

statistics     a mean over sites with an interval over sessions
held_out       the sessions that nothing was learnt from
arms           the weights that are compared, loaded one after the other
decisions      what is scored at a site: the error, the right call in its place, good calls of the session
forced         log-probs of these under each set of weights, kept as they come
token_gaps     by token, what a hint does to an erring turn
vllm_sampling  an engine that draws them quickly, where it is installed
sampling       actions that each model draws at held-out states
figures        rows to figures
judged         drawn actions as rows: read, judged, compared with what was done
damage         losses on good turns, code and sums
verdict        the primary figure as a word and two sentences
questions      all that is asked of a model, and its answers
record         what evaluation.json says of all that
evaluate       all of it in order, and what is written
"""
