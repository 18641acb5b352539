"""What the dims of the models' arguments stand for, as their authors would name them.

One letter a dim, as in the models' own comments: B batch, S positions, D model width, F hidden
width, K key/value heads, G queries a head, H head width, V words, E experts, I inner width, R rank,
N states, L layers, Y and X pixels, O channels. A hand plan says which letters go over which axes.
"""

import re

_ATTENTION = {
    r"'wq'\]$": "D K G H",
    r"'w[kv]'\]$": "D K H",
    r"'wo'\]$": "K G H D",
}
_TRANSFORMER = {
    **_ATTENTION,
    r"mlp'\]\['w_(gate|up)'\]$": "D F",
    r"mlp'\]\['w_down'\]$": "F D",
    r"unembed'\]$": "D V",
    r"embed'\]$": "V D",
    r"norm'\]\['(scale|bias)'\]$": "D",
    r"batch\['(tokens|targets|source)'\]$": "B S",
}
NAMES = {
    "gpt": _TRANSFORMER,
    "moe": {
        **_TRANSFORMER,
        r"mlp'\]\['w_(gate|up)'\]$": "E D F",
        r"mlp'\]\['w_down'\]$": "E F D",
        r"mlp'\]\['router'\]$": "D E",
    },
    "lora": {
        r"[qv]_down'\]$": "D R",
        r"q_up'\]$": "R K G H",
        r"v_up'\]$": "R K H",
        **_TRANSFORMER,
    },
    "decode": {**_TRANSFORMER, r"cache\.(keys|values)$": "L B T K H", r"^tokens$": "B"},
    "encdec": {
        r"feed_forward'\]\['w_in'\]\['w'\]$": "D F",
        r"feed_forward'\]\['w_in'\]\['b'\]$": "F",
        r"feed_forward'\]\['w_out'\]\['w'\]$": "F D",
        r"feed_forward'\]\['w_out'\]\['b'\]$": "D",
        **_TRANSFORMER,
    },
    "vit": {
        r"embed'\]\['w'\]$": "P D",
        r"embed'\]\['b'\]$": "D",
        r"head'\]\['w'\]$": "D V",
        r"head'\]\['b'\]$": "V",
        r"mlp_in'\]\['w'\]$": "D F",
        r"mlp_in'\]\['b'\]$": "F",
        r"mlp_out'\]\['w'\]$": "F D",
        r"mlp_out'\]\['b'\]$": "D",
        r"positions'\]$": "S D",
        r"batch\['images'\]$": "B Y X C",
        r"batch\['labels'\]$": "B",
        **_TRANSFORMER,
    },
    "ssm": {
        r"'w_(in|gate)'\]$": "D I",
        r"'kernel'\]$": "W 1 I",
        r"'w_rank'\]$": "I R",
        r"'w_step'\]\['w'\]$": "R I",
        r"'w_step'\]\['b'\]$": "I",
        r"'(w_write|w_read|log_decay)'\]$": "I N",
        r"'skip'\]$": "I",
        r"'w_out'\]$": "I D",
        **_TRANSFORMER,
    },
    "unet": {
        r"(conv1|conv2|inlet|outlet)'\](\[\d\])?\['w'\]$": "h w C O",
        r"(grow|shrink)'\]\[\d\]\['w'\]$": "h w C O",
        r"(skip|level)'\]\['w'\]$": "C O",
        r"'(b|bias|scale)'\]$": "O",
        r"batch\['(images|noise)'\]$": "B Y X C",
        r"batch\['noise_level'\]$": "B",
    },
    "dlrm": {
        r"tables'\]\[\d+\]$": "V D",
        r"layers'\]\[\d+\]\['w'\]$": "M F",
        r"layers'\]\[\d+\]\['b'\]$": "F",
        r"batch\['dense'\]$": "B M",
        r"batch\['categories'\]$": "B T",
        r"batch\['clicks'\]$": "B",
    },
}


def names_of(model: str, argument: str, rank: int) -> tuple[str | None, ...]:
    """Returns a letter a dim, None where nobody gave one; dims in front are stacked layers."""
    for pattern, letters in NAMES[model].items():
        if re.search(pattern, argument):
            found = letters.split()
            if len(found) <= rank:
                return ("L",) * (rank - len(found)) + tuple(found)
    return (None,) * rank
