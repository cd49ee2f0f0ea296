# SPDX-License-Identifier: Apache-2.0
"""Layout of the one tensor of a log interval's sums, which ranks add up. Terms of further objectives come last."""

TERM, TOKENS, ALL_MASKED, ZERO_NORM, ONE_LABEL = range(5)
ODDITIES = {
    ALL_MASKED: "sequences (or a rank's parts of them) whose tokens are all masked",
    ONE_LABEL: "tokens in chunks with one label only",
    ZERO_NORM: "hidden states of norm zero",
}
PAIRS = slice(5, 11)  # (sum, count) of positive, negative and largest negative cosines
NORMS = slice(11, 14)  # geometry.NormSums of the tokens that count
ONCE_NORMS, OFTEN_NORMS = slice(14, 17), slice(17, 20)  # of tokens alone with their label in a chunk; of all others
OF_LABELS = slice(ONCE_NORMS.start, OFTEN_NORMS.stop)
MARGIN, RIGHT_MARGIN = slice(20, 22), slice(22, 24)  # sum and count of classification margins
OF_MARGINS = slice(MARGIN.start, RIGHT_MARGIN.stop)
NUMBER = 24
MEASURED = slice(ALL_MASKED, NUMBER)  # in log steps alone; what is before it, and terms behind it, in every step
