"""Show a run as HTML and Markdown pages.

The pages are built from the files of the run alone, without torch and without network access. The same files give the
same bytes.

records      the artifacts of a run, and what it lacks
figures      the evaluation: verdict, intervals, sampled actions
plots        curves of the training and its costs, as inline SVG
findings     error sites in tables, the hint check, and the sites to review first
credit       each session turn by turn, with the outcome of each error
build        fills in the templates and writes all pages
"""
