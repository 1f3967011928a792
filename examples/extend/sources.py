"""A source of text: sums, as many as the argument says. `argosy prepare source:sums:1000 --extend sources.py`"""

import random
from collections.abc import Iterator

from argosy import extend


@extend.source("sums")
def sums(argument: str) -> Iterator[str]:
    draw = random.Random(0)  # seeded: each call must yield the same documents again
    for _ in range(int(argument or 100)):
        a, b = draw.randrange(1000), draw.randrange(1000)
        yield f"{a} + {b} = {a + b}\n"
