"""What is read again and what is taken over: the last ingest's rows are the cache of this one.

`session_sources` (the account of each family of files), `earlier` (what the last ingest left), `planning` (which
families are new or changed), `family_reading` (those, as finished lines), `gather` (new and old rows together),
`content_marks` and `settle` (which of them stay), `unplaced` (calls and results without a counterpart), `summary`.
"""
