"""Show a run as HTML and markdown pages, from its files alone: no torch, nothing fetched, the same bytes every time.

records      the artifacts of a run, and what it lacks
figures      the evaluation: verdict, intervals, sampled actions
plots        curves of the training and its costs, as inline SVG
findings     error sites in tables, the hint check, and the sites to review first
credit       a session turn by turn, with what became of each error
build        templates filled in and all pages written
"""
