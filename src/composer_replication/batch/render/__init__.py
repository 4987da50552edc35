"""A conversation as token ids with exact spans: the template is asked what it can say, and is never guessed at.

templates   a tokenizer's chat template as a function from messages to text
template_process, template_server   the process in which a template runs, under limits of memory and time
escape      text that must never become a special token
thinking    what becomes of a turn's thinking
dialect     what a template can say, found by asking it
messages    turns as the messages that this dialect shows
turn_edges  where a turn begins and ends in a rendering
pieces      a rendering cut at the turns' edges, each cut proved
encode      pieces of text as token ids, and what single tokens say
renderer    all of it: `Renderer.render`
decision    which tokens of a call decide it
"""
