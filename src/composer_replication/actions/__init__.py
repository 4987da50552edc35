"""What an assistant turn did: read in every shape it comes in, compared by meaning, beside what its session had shown.

calls            a tool call as a record, whatever a model wrote for its arguments
messages         a chat message's calls, text and thinking, in every shape
write            an action as one text, the form that states and pairs are known by
parse            that text read back
reply            a reply as an action: text, calls written in text, messages, blocks
tools            tools that agents share: kinds, keys, labels, defaults
tool_schemas     tools as calls that worked show them
paths            paths in one spelling
shell/           a shell command, read
patches          patches as the files they change
edits            edits by what they do to files
shown/           what a session has shown of files and folders
session_state    what a session had shown so far
prose            replies of text alone in one spelling
arguments        a call's arguments in one spelling
equality         when two actions are the same
near_duplicates  when two states are nearly the same
"""
