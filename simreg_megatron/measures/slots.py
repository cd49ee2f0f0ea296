# SPDX-License-Identifier: Apache-2.0
"""Where each sum of a log interval lies in the one tensor that ranks add up. Behind them: terms of more objectives."""

TERM, TOKENS, ALL_MASKED, ZERO_NORM, ONE_LABEL = range(5)
ODDITIES = {
    ALL_MASKED: "sequences (or a rank's parts of them) whose tokens are all masked",
    ONE_LABEL: "tokens in chunks with one label only",
    ZERO_NORM: "hidden states of norm zero",
}
PAIRS = slice(5, 11)  # (sum, count) of positive, negative and largest negative cosines
NORMS = slice(11, 14)  # magnitude.NormSums of the tokens that count
SAME_NORMS, OTHER_NORMS = slice(14, 17), slice(17, 20)  # likewise, once for every pair of equal, of other labels
ONCE_NORMS, OFTEN_NORMS = slice(20, 23), slice(23, 26)  # of tokens alone with their label in a chunk; of all others
OF_PAIRS = slice(SAME_NORMS.start, OFTEN_NORMS.stop)
RADIAL = slice(26, 28)  # magnitude.radial_sums of the whole loss's gradient
RIGHT_NORMS, WRONG_NORMS = slice(28, 31), slice(31, 34)  # of sampled tokens, by whether their top prediction is right
OF_PREDICTIONS = slice(RIGHT_NORMS.start, WRONG_NORMS.stop)
MARGIN, RIGHT_MARGIN = slice(34, 36), slice(36, 38)  # sum and count of classification margins
OF_MARGINS = slice(MARGIN.start, RIGHT_MARGIN.stop)
NUMBER = 38
MEASURED = slice(ALL_MASKED, NUMBER)  # in log steps alone; what is before it, and terms behind it, in every step
ISOTROPY = 4  # whether it was measured, and its three numbers
