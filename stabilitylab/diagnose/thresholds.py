"""Every number that decides whether something is an event, with its reason. Set before any run was looked at.

"Rows" are recorded steps of the series or table at hand: with a sparse cadence they lie further apart than steps.
"""

from __future__ import annotations

# What a jump is measured against: the largest number of so many earlier rows, and at least so many. A linear warm-up
# that starts near 0 multiplies its rate by up to 100 between its first rows, by at most 1.25 from the fifth row on.
PAST, LEAST_PAST = 50, 4
# A state of a layer (vanishing, dead, collapsed) must hold in so many rows one after the other; one row may be noise.
PERSIST = 3

# The learning rate against its maximum so far: schedules and restarts come back to it, or grow by per cents.
LR_JUMP = 3.0
# The size of an update, or of ||dF||, against its own past. Adam's answer to a sudden gradient is at most
# (1 - b1) / sqrt(1 - b2), 3.2 times the rate for (.9, .999), where 0.1 to 0.3 is usual; and noise stays within 2.
UPDATE_JUMP = 5.0
# An update counts only where it is at least this share of the model's largest: growth of 1e-12 to 1e-9 moves nothing.
UPDATE_SHARE = 0.1
# The size of a layer's weights between neighbouring rows: no optimizer at a working rate multiplies it by ten.
WEIGHT_JUMP = 10.0

# What enters a norm divides the gradient through it (||J|| ~ sqrt(d) / ||x||). Suddenly: against its own past;
# slowly: against the run's own start, since DeepNorm's alpha sqrt(d) is there by construction. Pre-LN's stream grows
# by a few times while it learns well, hence the order of magnitude. Slow growth after which the loss still came to a
# new minimum is a note. (This rule was added after a look at GPT-2 with its usual initialisation: the input of its
# last norm starts at a thirtieth of sqrt(d) and grows tenfold within 13 steps.)
LN_JUMP, LN_GROWTH = 3.0, 10.0

# A layer's gradient beside the largest of its stack. Adam stops balancing layers where gradients reach its eps, which
# is three to four orders below usual ones. The same ratio, the other way up, is a gradient that explodes downwards.
VANISHED = 1e-4
# In a run whose loss was judged and learns, it is a note: some layers hardly learn, the model does. (This rule was
# added after a first look: the bottom of default BranchNorm's 100 encoder layers falls to 1.5e-6, and the run trains.)
# Geometric decay that has not come that far is worth a note (DeepNet, Admin: Post-LN's decoder at 18 layers and more).
DECAYED, DECAY_PER_LAYER, DECAY_FIT = 0.05, -0.1, 0.95  # first over last layer; nats a layer; R^2 of the line
# The total gradient norm, or a layer's, against its own past; factors of 2 to 5 are everyday noise of small batches.
EXPLODED = 10.0
EXPLODED_SHARE = 0.1  # of the largest layer's: a layer's explosion that the model can feel

# A loss spike: the literature's 7 standard deviations (OLMo 2; AdaGC), robust ones here. The level is a median of
# the last rows, the noise that of first differences, so that a falling loss hides nothing. The floors keep the tiny
# noise of a flat or memorised loss from counting: shares of the level, and of the loss at the start.
SPIKE_SD, LEVEL_ROWS, NOISE_ROWS, LEAST_ROWS = 7.0, 10, 100, 10
SPIKE_OF_LEVEL, SPIKE_OF_START = 0.10, 0.02
# Divergence of held-out or training nll is the verdict's (2 nats over the minimum, not undone within 5 %); of a loss
# whose unit is unknown: ending above its start by this share of it.
DIVERGED_SHARE = 0.10
# A plateau at the unigram baseline is the verdict's "stuck" (stabilitylab/verdict.py).
# A plateau without a baseline: all rows together gained less than this share of the first level, ...
PLATEAU_GAIN = 0.02
# ... or the end gave back more than this share of all that had been gained; judged from this number of rows on.
PLATEAU_RELAPSE, PLATEAU_ROWS = 0.5, 20

# Attention entropy as a share of its ceiling, log of the number of keys, and of where it started (Zhai et al. 2023);
# the largest attention logit (QK-Clip's bound in Kimi K2).
ENTROPY_SHARE, ENTROPY_FALL, MAX_LOGIT = 0.05, 0.2, 100.0
