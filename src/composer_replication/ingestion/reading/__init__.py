"""Reading logs without giving up, before any format has a say.

`json_text` (JSON as real programs leave it), `source` (files, lines, and the report of what was left out), `documents`
(one document or many lines), `after_damage` (what stands behind a break) and `turn_list` (turns in the making).
"""
