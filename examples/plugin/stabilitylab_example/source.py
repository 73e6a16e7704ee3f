"""A data source: a task without a file, that a model learns by reading its source from the end."""

import numpy as np

from stabilitylab.data import SPECIALS, Corpus, Pairs, Sentences, source
from stabilitylab.errors import UsageError

PAIRS = 5000


@source("reversed", "reversed:WORDS")
def backwards(spec, config):
    """Turns random sentences of 4 to 12 words round; WORDS is the size of the vocabulary."""
    if not spec.isdecimal() or not int(spec):
        raise UsageError(f"'reversed:{spec}' does not say how many words there are: give a number, as in reversed:100.")
    names = [*SPECIALS, *(f"w{number}" for number in range(int(spec)))]
    random = np.random.default_rng(0)
    lengths = random.integers(4, 13, size=PAIRS)
    words = random.integers(len(SPECIALS), len(names), size=lengths.sum()).astype(np.int32)
    forth = Sentences(words, lengths)
    back = Sentences(np.concatenate([ids[::-1] for ids in forth.pick(np.arange(PAIRS))]), lengths)

    def decode(ids):
        return " ".join(names[one] for one in ids)

    def lines(split):
        return tuple([decode(ids) for ids in side.pick(np.arange(PAIRS))] for side in (forth, back))

    return Corpus(
        train=Pairs(forth, back),
        valid=None,
        source_vocab=len(names),
        target_vocab=len(names),
        joint=True,
        decode=decode,
        lines=lines,
    )
