"""Reading logs without giving up, before any format has a say.

json_text  JSON as real programs leave it: other encodings, NaN, half characters, endless nesting
source     files, lines, the text of a content field; the report of what was left out, and where
documents  one document or many lines, and what stands before damage
turn_list  turns in the making: messages, calls and results as every format adds them
counts     what a conversation holds, in numbers
"""
