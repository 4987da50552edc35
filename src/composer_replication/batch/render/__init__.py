"""A conversation as token ids with exact spans: the template is asked what it can say, and is never guessed at.

templates   a tokenizer's chat template as a function from messages to text
escape      text that must never become a special token
thinking    what becomes of a turn's thinking
dialect     what a template can say, found by asking it
messages    turns as the messages that this dialect shows
turn_edges  where a turn begins and ends in a rendering
pieces      a rendering cut at the turns' edges, each cut proved
encode      pieces of text as token ids
renderer    all of it: `Renderer.render`
left_cut    where a sequence begins that is too long
token_text  the way back: what single tokens say
"""

from composer_replication.batch.render.renderer import (
    TEXT_FOLLOWS_CALL as TEXT_FOLLOWS_CALL,
)
from composer_replication.batch.render.renderer import (
    THINKING_COMES_LATE as THINKING_COMES_LATE,
)
from composer_replication.batch.render.renderer import (
    WITHOUT_ANSWER as WITHOUT_ANSWER,
)
from composer_replication.batch.render.renderer import (
    RenderedSequence as RenderedSequence,
)
from composer_replication.batch.render.renderer import (
    Renderer as Renderer,
)
from composer_replication.batch.render.renderer import (
    Tools as Tools,
)
from composer_replication.batch.render.renderer import (
    TurnSpan as TurnSpan,
)
from composer_replication.batch.render.renderer import (
    thinking_counts as thinking_counts,
)
