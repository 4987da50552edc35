"""The words that tasks are made of. Long enough lists that a held-out seed is a task nobody has seen."""

from __future__ import annotations

THINGS = (
    *("price", "score", "length", "weight", "speed", "height", "depth", "width", "cost", "delay", "level", "size"),
    *("ticket", "parcel", "room", "table", "lamp", "wheel", "bottle", "letter", "bridge", "engine", "garden", "window"),
    *("order", "report", "signal", "packet", "ladder", "barrel", "bucket", "candle", "carpet", "jacket", "kettle"),
    *("needle", "pillow", "rocket", "saddle", "tunnel", "vessel", "wagon", "anchor", "basket", "cable", "drawer"),
    *("filter", "gauge", "handle", "island", "jewel", "marker", "number", "orbit", "panel", "record", "sheet"),
    *("token", "unit", "valve", "answer", "button", "client", "device", "event", "field", "guest", "hour", "image"),
)
PLACES = (
    *("shop", "game", "road", "bank", "farm", "lab", "ship", "park", "mine", "port", "city", "mill", "museum"),
    *("school", "library", "factory", "hotel", "market", "office", "station", "studio", "theatre", "tower", "village"),
    *("archive", "bakery", "camp", "clinic", "dock", "forest", "gallery", "harbour", "kitchen", "lodge", "plant"),
    *("quarry", "ranch", "stable", "temple", "vault", "yard", "arena", "depot", "garage"),
)
EXTRAS = (
    *("tax", "bonus", "margin", "offset", "fee", "gap", "step", "shift", "extra", "rest", "base", "toll", "refund"),
    *("discount", "penalty", "reserve", "credit", "buffer", "surcharge", "advance", "deposit", "excess", "handicap"),
    *("padding", "premium", "rebate", "share", "slack", "stake", "tip", "topping", "trim", "lead", "lag", "wage"),
)
COLOURS = (
    *("red", "blue", "green", "black", "white", "brown", "grey", "pink", "gold", "silver", "violet", "orange"),
    *("amber", "beige", "coral", "cream", "ivory", "khaki", "lime", "navy", "olive", "plum", "rose", "teal"),
)
